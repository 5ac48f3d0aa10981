"""The figures of `python -m tests.readability` count what they say."""

from __future__ import annotations

import ast

from tests.readability import PACKAGE, complexity, lines_of_code, measured


def test_blanks_comments_and_docstrings_are_no_code():
    source = '"""What."""\n\n# why\ndef f():\n    """Do it."""\n\n    return (\n        1\n    )\n'

    assert lines_of_code(source, ast.parse(source)) == {4, 7, 8, 9}


def test_blanks_and_comments_of_lua_are_no_code():
    script = measured(PACKAGE / "backends/redis/lua/shared/mine.lua")

    assert script.title == "What is in the lock, and whether this token is its owner."
    assert (script.lines, script.functions) == (2, [])


def test_every_branch_counts_for_the_function_that_has_it():
    source = """
def f(a, b):
    assert a or b
    with a:
        for c in [d for d in b if d]:
            if a and b and c:
                return 1 if a else 2
    def g():
        while a:
            pass
"""
    [f] = ast.parse(source).body
    [g] = [node for node in f.body if isinstance(node, ast.FunctionDef)]

    # or, for, comprehension, its if, if, two ands, conditional expression
    assert complexity(f) == 1 + 8
    assert complexity(g) == 1 + 1
