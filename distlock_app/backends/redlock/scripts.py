"""The Lua scripts that Redlock runs on each node, in `lua/`; each answers with one line."""

from __future__ import annotations

from pathlib import Path

from ..redis.scripts import Script, lua

LUA = Path(__file__).parent / "lua"

ACQUIRE = Script(lua(LUA / "acquire.lua"), keys=2, args=4)
ACQUIRE_OR_WAIT = Script(lua(LUA / "acquire.lua"), keys=2, args=6)
RAISE = Script(lua(LUA / "raise.lua"), keys=2, args=2)
EXTEND = Script(lua(LUA / "extend.lua"), keys=2, args=2)
END_IN = Script(lua(LUA / "extend.lua"), keys=2, args=3)
RELEASE = Script(lua(LUA / "release.lua"), keys=2, args=2)
RELEASE_FOR_GOOD = Script(lua(LUA / "release.lua"), keys=2, args=3)
RELEASE_AND_WAIT = Script(lua(LUA / "release.lua"), keys=2, args=4)
CLEAR = Script(lua(LUA / "clear.lua"), keys=2, args=1)
LIST = Script(lua(LUA / "list.lua"), keys=1, args=2)
SCRIPTS = (ACQUIRE, RAISE, EXTEND, RELEASE, CLEAR, LIST)
