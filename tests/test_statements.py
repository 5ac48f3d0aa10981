"""No value stands in a statement: what is put together is constant, or a comment that is quoted.

Lua is sent as it stands in its file.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "distlock_app"
SQL = re.compile(
    r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM|KILL|SET SESSION|SET LOCAL|WHERE|GET_LOCK|LOCK|"
    r"set_config|pg_\w+|redis\.call|EVAL)\b.*[\s(=]"
)
# What may be put into a statement, and why it is no value from outside.
MAY = {
    "note(claim)": "a comment of ASCII JSON without * and %",
    "note(claim, self.fence)": "the same",
    "self.note()": "the same",
    "session.note()": "the same",
    "'_try' * (wait == 0)": "constant",
    "'_shared' * claim.shared": "constant",
    "verb": "constant, from these",
    "limit": "constant: '' or a hint of MySQL, with a number",
    "seconds": "a number",
    "self.prefix": "hex digits: a hash, made there",
    "claim.key": "hex digits: a hash, made by key_of()",
    "', '.join(['IS_USED_LOCK(%s)'] * len(some))": "constants",
    "key": "is_key() said yes",
    "Statements.RELEASE": "constant",
    "may": "constant: the dialect's own condition",
    "marks": "placeholders",
    "keys": "placeholders",
    "n": "the number of a placeholder",
    "str(wait_ms)": "a number",
    "'NOWAIT' * (wait == 0)": "constant",
    "self.queue_of(key)": "a number, or hex digits: a hash, made there",
    "str(self.queue_of(key))": "the same",
    "waiting.connection.thread_id()": "an int of the driver",
    "waiting.pid": "an int of the server",
    "table": "quote_name() of a model's table",
    "column": "quote_name() of a model's column",
    "function + _GUARDED_SCRIPT": "the project's own script; what it works on goes apart",
}


def is_constant(value):
    """Tell whether this is made of literals, CONSTANTS of a module and files of Lua alone."""
    names = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
    kinds = (ast.Name, ast.Constant, ast.BinOp, ast.Add, ast.Load, ast.Div, ast.Call)
    known = all(name.isupper() or name == "lua" for name in names)
    return known and all(isinstance(node, kinds) for node in ast.walk(value))


def places_in(value):
    """Tell whether this is the "{place}" of something in a text."""
    return isinstance(value, ast.Constant) and re.fullmatch(r"\{\w+\}", str(value.value))


def written(tree):
    """Yield what is put into texts that look like a statement: (line, expression)."""
    for node in ast.walk(tree):
        parts, values = [], []
        if isinstance(node, ast.JoinedStr):
            parts = [v.value for v in node.values if isinstance(v, ast.Constant)]
            values = [v.value for v in node.values if isinstance(v, ast.FormattedValue)]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.Add)):
            parts = [v.value for v in (node.left, node.right) if isinstance(v, ast.Constant)]
            values = [v for v in (node.left, node.right) if not isinstance(v, ast.Constant)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "format" and isinstance(node.func.value, ast.Constant):
                parts, values = (
                    [node.func.value.value],
                    node.args + [k.value for k in node.keywords],
                )
            if node.func.attr == "replace" and [v for v in node.args if places_in(v)]:
                parts, values = ["SELECT "], node.args[1:]  # of a statement that has a name
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Script":
            parts, values = ["EVAL "], node.args
        text = " ".join(map(str, parts)) + " "
        if SQL.search(text):
            asked = (value for value in values if not is_constant(value))
            yield from ((node.lineno, ast.unparse(value)) for value in asked)


def found_in(source):
    return sorted({what for _, what in written(ast.parse(source))} - MAY.keys())


def test_no_value_is_written_into_a_statement():
    found = {
        f"{path.relative_to(PACKAGE)}:{line}": what
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, what in written(ast.parse(path.read_text()))
        if what not in MAY
    }

    assert found == {}


def test_lua_is_in_files_and_runs_no_text():
    modules = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    scripts = "".join(path.read_text() for path in PACKAGE.rglob("*.lua"))

    assert "redis.call" not in modules
    assert set(re.findall(r"redis\.p?call\((.)", scripts)) == {"'"}  # a command is a literal
    assert re.findall(r"\b(load|loadstring|dofile|setfenv)\b", scripts) == []


def test_the_search_finds_what_it_is_for():
    assert found_in("""ask(f"SELECT IS_USED_LOCK('{prefix}{key}')")""") == ["prefix"]
    assert found_in("""ask(f"SELECT IS_USED_LOCK('{lock}')")""") == ["lock"]
    assert found_in("""ask("KILL %s" % number)""") == ["number"]
    assert found_in("""ask("SELECT pg_terminate_backend({pid})".format(pid=pid))""") == ["pid"]
    assert found_in("""ask("SELECT GET_LOCK('" + name)""") == ["name"]
    assert found_in("""ask(self.TAKE.replace("{name}", name))""") == ["name"]
    assert found_in("""Script(lua(LUA / file), args=2)""") == ["lua(LUA / file)"]
    assert found_in("""Script(lua(LUA / "a.lua"), args=2)""") == []
    assert found_in("""ask(f"SELECT {note(claim)} GET_LOCK(%s, %s)", key, 1)""") == []
