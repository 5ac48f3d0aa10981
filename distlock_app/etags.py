"""Import path for `guards/optimistic/etags`: `ETag` and `If-Match` of versioned objects."""

from __future__ import annotations

from .guards.optimistic.etags import (
    PreconditionFailed,
    PreconditionRequired,
    etag_of,
    guarded_view,
    require_match,
    with_etag,
)

__all__ = [
    "PreconditionFailed",
    "PreconditionRequired",
    "etag_of",
    "guarded_view",
    "require_match",
    "with_etag",
]
