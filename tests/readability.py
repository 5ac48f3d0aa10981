"""How readable the package is, in numbers: `python -m tests.readability [--names] [--check]`.

Without options: lines of code (without blanks, comments and docstrings), functions, the longest
of them and the mean cyclomatic complexity, of each package and each file. `--names` prints what a
reader sees first, each file with its first line; `--check` exits with 1 if a limit is broken.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "distlock_app"

LINES_IN_FILE = 250
LINES_IN_ALL = 12_000
LINES_OF_FUNCTION = 40
MEAN_COMPLEXITY = 2.6
ROOT_MODULES = 16

# Each opens one more way through a function; an assert does not, and neither does `with`.
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class File:
    """One module or Lua script, measured."""

    path: Path
    title: str
    lines: int
    functions: list[tuple[str, int, int]]  # name, lines of code, complexity

    @property
    def folder(self) -> str:
        """Where it lies in the package; "" is the package itself."""
        parent = self.path.parent.as_posix()
        return "" if parent == "." else parent


def measured(path: Path) -> File:
    """Read one file."""
    source = path.read_text()
    if path.suffix == ".lua":
        script = [line.strip() for line in source.splitlines()]
        written = sum(line[:2] not in ("", "--") for line in script)
        return File(path.relative_to(PACKAGE), script[0].removeprefix("-- "), written, [])
    tree = ast.parse(source)
    code = lines_of_code(source, tree)
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, Function):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines = sum(first <= line <= (node.end_lineno or first) for line in code)
            functions.append((node.name, lines, complexity(node)))
    title = (ast.get_docstring(tree) or "").partition("\n")[0]
    return File(path.relative_to(PACKAGE), title, len(code), functions)


def lines_of_code(source: str, tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that have code in them."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, Function)) and ast.get_docstring(node):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    written = source.split("\n")
    return {line for line in lines if written[line - 1].strip()}


def complexity(function: Function) -> int:
    """Return the number of ways through it; functions inside of it count for themselves."""
    found = 1
    for node in inside(function):
        if isinstance(node, BRANCHES):
            found += 1
        elif isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
        elif isinstance(node, ast.match_case):
            found += 1
    return found


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function, but not in functions or classes defined there."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (Function, ast.ClassDef)):
            yield from inside(child)


def package() -> list[File]:
    """Measure every module and script except migrations, which Django writes."""
    paths = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.lua")]
    paths = [path for path in paths if "migrations" not in path.parts]
    return sorted(map(measured, paths), key=lambda file: (file.folder, file.path))


def print_names(files: Iterable[File]) -> None:
    """Print what a reader sees first."""
    for file in files:
        if file.title:
            print(f"{file.path.as_posix():40} {file.title}")


def print_sizes(files: list[File]) -> None:
    """Print each package with its files, then the whole."""
    print(f"{'':40}{'lines':>6}{'functions':>11}{'longest':>9}{'complexity':>12}")
    for folder in sorted({file.folder for file in files}):
        here = [file for file in files if file.folder == folder]
        print_size(f"{folder or 'distlock_app'}/", here)
        for file in here:
            if file.lines:
                print_size(f"    {file.path.name}", [file])
    print_size("all", files)
    print(f"modules at the root: {len(at_root(files))}")
    name, lines, _ = longest(files)
    print(f"longest function: {name}, {lines} lines")


def print_size(title: str, files: list[File]) -> None:
    """Print one line."""
    functions = [function for file in files for function in file.functions]
    lines = sum(file.lines for file in files)
    most = max((lines for _, lines, _ in functions), default=0)
    print(f"{title:40}{lines:6,}{len(functions):11,}{most:9}{mean_complexity(files):12.2f}")


def at_root(files: Iterable[File]) -> list[File]:
    """Return the modules that lie in no package."""
    return [file for file in files if not file.folder]


def longest(files: Iterable[File]) -> tuple[str, int, int]:
    """Return the function with the most lines of code."""
    return max((f for file in files for f in file.functions), key=lambda function: function[1])


def mean_complexity(files: Iterable[File]) -> float:
    """Return the mean over all functions."""
    found = [branches for file in files for _, _, branches in file.functions]
    return sum(found) / len(found) if found else 0.0


def broken_limits(files: list[File]) -> Iterator[str]:
    """Yield what is too large, in words."""
    for file in files:
        if file.lines > LINES_IN_FILE:
            yield f"{file.path}: {file.lines} lines, more than {LINES_IN_FILE}"
        for name, lines, _ in file.functions:
            if lines > LINES_OF_FUNCTION:
                yield f"{file.path}: {name}() has {lines} lines, more than {LINES_OF_FUNCTION}"
    if (lines := sum(file.lines for file in files)) > LINES_IN_ALL:
        yield f"the package: {lines:,} lines, more than {LINES_IN_ALL:,}"
    if (mean := mean_complexity(files)) > MEAN_COMPLEXITY:
        yield f"the package: mean complexity {mean:.2f}, more than {MEAN_COMPLEXITY}"
    if (modules := len(at_root(files))) > ROOT_MODULES:
        yield f"the root: {modules} modules, more than {ROOT_MODULES}"


def main() -> int:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.readability", description=__doc__)
    parser.add_argument("--names", action="store_true", help="each file with its first line")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is broken")
    options = parser.parse_args()
    files = package()
    if options.names:
        print_names(files)
        return 0
    print_sizes(files)
    broken = list(broken_limits(files))
    for line in broken:
        print(line)
    return 1 if broken and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
