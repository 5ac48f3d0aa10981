"""The page of what distlock_app uses of other libraries without their promise names all of it."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import distlock_app

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/explanation/private-parts.md").read_text()
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
# Private by their name only: the documentation of Python and of Django describes them.
DOCUMENTED = {
    *("_asdict", "_fields", "_make", "_replace", "_exit"),
    *("_base_manager", "_default_manager", "_meta", "_state"),
}
ASKS = {"getattr", "hasattr", "setattr", "delattr"}


def private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def used(tree: ast.AST) -> Iterator[str]:
    """Yield the private attributes that a module reads or writes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ("super " if ast.unparse(node.value) == "super()" else "") + node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ASKS:
            yield from (str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (alias.name for alias in node.names)


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


def overridden() -> Iterator[str]:
    """Yield the private methods of other libraries that classes of the app override."""
    for module in pkgutil.walk_packages(distlock_app.__path__, "distlock_app."):
        if ".migrations." in module.name:
            continue
        for kind in vars(import_module(module.name)).values():
            if not inspect.isclass(kind) or not kind.__module__.startswith("distlock_app"):
                continue
            for base in kind.__mro__[1:]:
                if base.__module__.partition(".")[0] not in ("distlock_app", "abc", "typing"):
                    yield from filter(private, vars(kind).keys() & vars(base).keys())


def test_the_page_names_every_private_part():
    trees = [ast.parse(file.read_text()) for file in Path(distlock_app.__path__[0]).rglob("*.py")]
    made = Counter(name for tree in trees for name in defined(tree))
    ours = {*made, *(f"super {name}" for name in made if made[name] > 1)}
    found = {name for tree in trees for name in used(tree)} - ours - DOCUMENTED
    found = {*filter(private, (name.removeprefix("super ") for name in found)), *overridden()}

    named = {part for row in ROWS for part in re.findall(r"[`.](_[a-z]\w*)", row[0])}

    assert len(found) > 10
    assert found - named == set()


def test_every_part_is_used_and_has_tests():
    code = "".join(file.read_text() for file in Path(distlock_app.__path__[0]).rglob("*.py"))
    assert len(ROWS) > 20
    for part, _, tests in ROWS:
        for name in re.findall(r"(\w+)(?:\(\))?`", part):
            assert re.search(rf"\b{name}\b", code), f"{name} is not used any more"
        where = re.findall(r"`(test_\w+\.py)((?:::\w+)*)`", tests)
        assert where, f"no test for {part}"
        for file, path in where:
            text = (ROOT / "tests" / file).read_text()
            for name in filter(None, path.split("::")):
                assert re.search(rf"(def|class) {name}\b", text), f"{file} has no {name}"
