"""A hold as signed text, so that another process can take the lock over."""

from __future__ import annotations

from typing import Any

from django.core import signing

from ..claims import Grant

SALT = "distlock_app.handover"
# The fields of a claim that the next process needs.
FIELDS = ("name", "owner", "ttl", "shared", "fair", "limit", "stable")


def packed(alias: str, grant: Grant, **options: Any) -> str:
    """Return `grant` as text for `unpacked`. Anyone with the text can release the lock."""
    claim = {field: getattr(grant.claim, field) for field in FIELDS} | options
    # An object, such as a connection, cannot be handed over.
    session = grant.session if isinstance(grant.session, (int, str)) else None
    return signing.dumps([alias, claim, grant.fence, session], salt=SALT)


def unpacked(text: str) -> list[tuple[str, dict[str, Any], int | None, Any]]:
    """Return alias, options, fencing token and session of the lock on each of its aliases.

    Raise TypeError or ValueError for any other text.
    """
    if not isinstance(text, str):
        raise TypeError(f"Lock.resume() takes the text of Hold.dump(), not {text!r}")
    try:
        return [signing.loads(part, salt=SALT) for part in text.split(" ")]
    except signing.BadSignature:
        raise ValueError(
            "this is not a valid text of Hold.dump(), or was signed with another SECRET_KEY"
        ) from None
