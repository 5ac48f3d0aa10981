"""The Lua scripts of locks on Redis, in `lua/`, and the requests that run them.

Each script is atomic, may be repeated by the same owner, and answers with one line of numbers.
`lua/shared/begin.lua` says which keys a lock has and what is in them.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache, lru_cache
from pathlib import Path

LUA = Path(__file__).parent / "lua"
INCLUDE = re.compile(r"^ *-- include: (.+)$", re.M)


@cache
def lua(file: Path) -> str:
    """Return a script; "-- include: FILE", a path from its own folder, stands for that file."""
    return INCLUDE.sub(lambda line: lua(file.parent / line[1]), file.read_text(encoding="utf-8"))


def pack(*words: bytes) -> bytes:
    """Return the words of one command as they go over the wire (RESP)."""
    return b"*%d\r\n%b" % (len(words), bulks(*words))


def bulks(*words: bytes) -> bytes:
    """Return words as they stand inside a command."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


# A request: head, length of the token, token, tail. Inlined, as a function would cost each lock
# two calls.
REQUEST = b"%b$%d\r\n%b\r\n%b"


class Script:
    """A script, and the requests that run it."""

    __slots__ = ("_opening", "load", "promises")

    def __init__(self, source: str, *, keys: int = 6, args: int, promises: bool = False) -> None:
        """`promises`: a 1 as its first number means that the caller has the lock."""
        self.promises = promises
        code = source.encode()
        sha = hashlib.sha1(code, usedforsecurity=False).hexdigest().encode()
        self.load = pack(b"SCRIPT", b"LOAD", code)
        self._opening = b"*%d\r\n%b" % (3 + keys + args, bulks(b"EVALSHA", sha, b"%d" % keys))

    def head(self, *words: bytes) -> bytes:
        """Return the packed EVALSHA up to its first arguments; `bulks` packs the others."""
        return self._opening + bulks(*words)


ACQUIRE = Script(lua(LUA / "acquire.lua"), args=7, promises=True)
EXTEND = Script(lua(LUA / "extend.lua"), args=3, promises=True)
END_IN = Script(lua(LUA / "extend.lua"), args=4, promises=True)
RELEASE = Script(lua(LUA / "release.lua"), args=2)
WITHDRAW = Script(lua(LUA / "release.lua"), args=3)
CLEAR = Script(lua(LUA / "clear.lua"), args=2)
GUARDED_SET = Script(lua(LUA / "guarded_set.lua"), keys=7, args=5)
PASS = Script(lua(LUA / "latch_pass.lua"), args=7)
COUNT_DOWN = Script(lua(LUA / "latch_count_down.lua"), args=4)
_GUARDED_SCRIPT = lua(LUA / "guarded_script.lua")
_ACQUIRE_ALL = lua(LUA / "acquire_all.lua")


@lru_cache(maxsize=64)
def acquire_all(count: int) -> Script:
    """Return the script that takes so many mutexes."""
    return Script(_ACQUIRE_ALL, keys=6 * count, args=4 * count, promises=True)


@lru_cache(maxsize=64)
def guarded_script(source: str, keys: int, args: int) -> Script:
    """Return the script that runs the caller's `source` with so many keys and arguments."""
    function = f"local function guarded(KEYS, ARGV)\n{source}\nend\n"
    return Script(function + _GUARDED_SCRIPT, keys=6 + keys, args=2 + args)
