"""Notes in the statements of a session, by which people see whose it is and what it locks."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

from ...claims import Claim
from ...primitives.identity import holder_fields
from ...primitives.names import KEY, shown

# The comment of statements, for administrators that look at the sessions on the server.
# A server may keep only its beginning.
NOTE = re.compile(
    rf"/\* distlock ([0-9a-f]{{8}}) ({KEY}) ([0-9]{{1,19}})"
    r"(?: (\"(?:[^\"\\]|\\.)*\") (\{.*?\}) \*/)?",
    re.DOTALL,
)


def note(claim: Claim, fence: int | None = None) -> str:
    """Return a comment for the statements of `claim`: people see it beside the session."""
    # What distinguishes one acquisition from the next, without its token.
    tag = hashlib.sha256(claim.owner.encode()).hexdigest()[:8]
    return f"/* distlock {tag} {claim.key} {fence or 0} {_shown(claim.name, claim.holder)} */"


@lru_cache(maxsize=1024)
def _shown(name: str, holder: str) -> str:
    # ASCII JSON without an asterisk cannot end the comment; mysqlclient puts values for "%".
    text = f"{json.dumps(shown(name))} {holder}"
    return text.replace("*", "\\u002a").replace("%", "\\u0025")


def from_note(statement: str | None, key: str) -> dict[str, Any]:
    """Return the fields of a Holding of `key` that are in a note."""
    found = NOTE.search(statement or "")
    if found is None or found[2] != key:
        return {}
    fields: dict[str, Any] = {"tag": found[1], "fence": int(found[3]) or None}
    with suppress(ValueError):  # cut off, or made up
        fields |= {"name": shown(json.loads(found[4] or "")), "holder": holder_fields(found[5])}
    return fields
