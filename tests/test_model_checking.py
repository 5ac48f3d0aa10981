"""The models of the lock table's queue and of the hand-over on Redis keep their promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.__main__ import PROTOCOLS, broken
from tests.model.explore import Model, Step, explore
from tests.model.lock_table import LockTable
from tests.model.redis_handover import RedisHandover

PAGE = Path(__file__).parents[1] / "docs/explanation/model.md"
# Small ones; `python -m tests.model` explores more.
CASES = [
    {"processes": 3, "faults": 1},
    {"processes": 3, "ttl": 1},
    {"processes": 2, "ttl": 2, "faults": 1},
]
DEFECTS = [
    pytest.param(protocol, defect, id=f"{protocol.__name__}, {defect}")
    for protocol in (LockTable, RedisHandover)
    for defect in protocol.DEFECTS
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_no_state_of_a_protocol_breaks_a_promise(protocol, case):
    assert explore(protocol(**case)).broken == ""


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "defect"), DEFECTS)
def test_a_protocol_that_is_broken_on_purpose_is_caught(protocol, defect):
    result = broken(protocol, defect)

    assert result.broken
    assert f"| {defect} | {protocol.DEFECTS[defect]} | {result.broken} |" in PAGE.read_text("utf-8")


def test_a_trace_tells_how_a_wake_up_is_lost():
    shown = str(broken(LockTable, "early call")).splitlines()

    assert shown[-6:] == [
        "  8 B: take wait -> waits           row: A (2); queue lock: -",
        "  9 B: asks for the queue lock      row: A (2); queue lock: B",
        " 10 B is called                     row: A (2); queue lock: B",
        " 11 B: take turn -> called          row: A (2); queue lock: B",
        " 12 A: release -> done              row: free (1); queue lock: B",
        "    Broken: a wait may never end",
    ]


class Graph(Model):
    """A model whose steps are given: a letter leads to letters, "?x" is not sure to happen."""

    DEFECTS = {}

    def __init__(self, rest, **edges):
        super().__init__()
        self.rest, self.edges = rest, edges

    def start(self):
        return "a"

    def steps(self, state):
        for after in self.edges.get(state, "").split():
            yield Step(f"to {after}", after[-1], sure=after[0] != "?")

    def broken(self, state):
        return "never x" if state == "x" else ""

    def at_rest(self, state):
        return state in self.rest

    def normal(self, state):
        return state.lower()

    def show(self, state):
        return state


def way(result):
    return "".join(shown for _, shown in result.trace)


def test_the_shortest_way_to_a_broken_promise_is_found():
    result = explore(Graph("abcx", a="b c", b="c", c="?x"))

    assert (result.broken, way(result)) == ("never x", "acx")


def test_a_cycle_is_fine_if_a_step_that_is_sure_leads_out_of_it():
    assert explore(Graph("c", a="b", b="a c")).broken == ""


def test_a_step_that_is_not_sure_does_not_end_a_wait():
    result = explore(Graph("c", a="b", b="a ?c"))

    assert (result.broken, way(result)) == ("a wait may never end", "a")


def test_of_the_endless_waits_that_one_is_shown_in_which_nothing_happens_any_more():
    assert way(explore(Graph("", a="b c", b="a", c="d"))) == "acd"


def test_states_that_are_the_same_are_explored_once_and_keep_their_names_in_a_trace():
    result = explore(Graph("", a="B", b="c", B="C", c="d", C="D"))

    assert (result.states, way(result)) == (4, "aBCD")
