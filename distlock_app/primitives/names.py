"""Lock names: the hash under which backends keep them, their printable text for people."""

from __future__ import annotations

import hashlib
import re
import zlib
from functools import lru_cache

# People see at most this many characters; the key covers the whole name.
SHOWN_LENGTH = 200

# What backends keep a lock under, see key_of().
KEY = "[0-9a-f]{40}"


class Made(str):
    """A name that remembers the template it was made from, for metrics."""

    __slots__ = ("template",)
    template: str

    def __new__(cls, name: str, template: str) -> Made:
        made = super().__new__(cls, name)
        made.template = template
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.template


def template_of(name: str) -> str:
    """Return the template that `name` was made from; "" if it was not."""
    return getattr(name, "template", "")


def checked(name: str) -> str:
    """Return `name`, or raise TypeError / ValueError: a name is any non-empty text."""
    if not isinstance(name, str):
        raise TypeError(f"a lock name must be a str, not {type(name).__name__}")
    if not name:
        raise ValueError("a lock name must not be empty")
    return name


def bucket(name: str, value: object, *, buckets: int = 16) -> str:
    """Return one of `buckets` names, always the same for the same `str(value)`.

    For work on one hot item that only has to be serialised among some of its callers.
    """
    if buckets < 1:
        raise ValueError(f"buckets must be 1 or more, not {buckets!r}")
    number = zlib.crc32(str(value).encode("utf-8", "surrogatepass")) % buckets
    template = template_of(checked(name))
    return Made(f"{name}:{number}", f"{template}:{{bucket}}" if template else "")


@lru_cache(maxsize=4096)
def key_of(name: str, kind: bytes = b"") -> str:
    """Return the 40 lower-case hex digits under which backends keep `name`.

    A `kind` separates other things from locks of the same name.

    160 bits of SHA-256: no backend folds case or accents, strips blanks, stops at NUL or cuts
    them, and names of any length fit (64 characters is MySQL's limit for named locks).
    """
    # No text is encoded with a byte FF.
    tag = b"\xff" + kind if kind else b""
    return hashlib.sha256(tag + name.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def is_key(text: str) -> bool:
    """Return whether backends may keep a lock under `text`; nothing else ever reaches them."""
    return re.fullmatch(KEY, text) is not None


def checked_key(text: str) -> str:
    """Return `text`, or raise ValueError: pages and commands pass what a user typed."""
    if not is_key(text):
        raise ValueError(f"not the key of a lock: {text!r:.80}")
    return text


def shown(name: str) -> str:
    """Return `name` as printable text of at most `SHOWN_LENGTH` characters.

    Control characters, NUL, lone surrogates and direction marks are shown escaped: a name cannot
    break or reorder what is around it on a page, in a log or in a terminal. Two names of letters
    that look alike, or of some that cannot be seen, may look the same: their keys tell them apart.
    """
    if len(name) <= SHOWN_LENGTH and name.isprintable():
        return str(name)
    # One more than fits shows that there is more: no escape is shorter than its character.
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name[: SHOWN_LENGTH + 1])
    return text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 1] + "…"
