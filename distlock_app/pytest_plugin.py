"""Fixtures for the tests of projects; pytest finds them without an import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

# pytest loads this before there are settings, so the rest is imported at first use.


@pytest.fixture
def locks_in_memory() -> Iterator[None]:
    """Let every alias lock in the memory of this process."""
    from .testing import override_locks

    with override_locks():
        yield


@pytest.fixture
def held_elsewhere() -> Iterator[Callable[..., Any]]:
    """`held_elsewhere("pay:1")`: another owner holds the lock, until the end of the test."""
    from .testing import held_elsewhere

    with ExitStack() as stack:
        yield lambda name, **options: stack.enter_context(held_elsewhere(name, **options))
