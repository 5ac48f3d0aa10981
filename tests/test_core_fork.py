"""fork(): what the parent holds is not the child's, and the child can lock by itself."""

from __future__ import annotations

import pytest

from tests import settings

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])


def test_a_child_neither_releases_nor_renews_what_its_parent_holds(processes):
    answer = processes.start("tests.core_workers:leave_the_with_in_a_child").result()

    assert answer["child"] == {
        "lost": True,
        "check": "LockLost",
        "extend": "LockLost",
        "release": "NotHeld",
        "expires_in": 0,
    }
    assert answer["asked by child"] == []
    assert answer["mine"] is False


def test_a_child_can_take_the_same_lock_and_keeps_it_renewed(processes):
    answer = processes.start("tests.core_workers:take_the_same_lock_in_a_child").result()

    assert answer == {"fresh": True, "asked": ["acquire", "extend", "release"]}


def test_no_two_processes_draw_the_same_token(processes):
    assert processes.start("tests.core_workers:draw_tokens_in_a_child").result() == 600


def test_workers_of_uwsgi_begin_anew_once_whether_python_saw_the_fork_or_not(processes):
    answer = processes.start("tests.core_workers:lock_in_workers_of_uwsgi").result()

    worker = {"calls": ["anew", "earlier hook"], "lost": True}
    assert answer == {"workers": [worker] * 2, "tokens": 300, "calls here": []}


def test_a_child_can_lock_in_asyncio(processes):
    assert processes.start("tests.core_workers:use_asyncio_in_a_child").result() is True


def test_a_child_leaves_the_transaction_of_its_parent_alone(processes):
    assert processes.start("tests.core_workers:leave_an_atomic_lock_in_a_child").result() == []


def test_a_child_that_ends_a_transaction_releases_nothing_of_its_parent(processes):
    answer = processes.start("tests.core_workers:end_the_transaction_in_a_child").result()

    assert answer == {"children": [[], []], "held": True, "free": True}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_multiprocessing_releases_what_it_rolled_back_last(processes, method):
    worker = processes.start("tests.core_workers:roll_back_at_the_end_of_a_child", method=method)

    assert worker.result() is True


def test_a_child_forked_while_other_threads_lock_does_not_hang(processes):
    worker = processes.start("tests.core_workers:fork_while_threads_lock", forks=15)

    assert worker.result() == ["fine"] * 15


@pytest.mark.parametrize(
    ("using", "server"),
    [
        ("redis", "redis_url"),
        ("cluster", "cluster_urls"),
        ("quorum", "redlock_urls"),
        ("etcd", "etcd_url"),
        ("zookeeper", "zookeeper_url"),
        ("locks", "db"),
        *((using, "db") for using in set(settings.DISTLOCK) & {"named", "advisory"}),
    ],
)
def test_the_first_lock_imports_nothing_of_which_a_fork_would_leave_a_half(
    using, server, processes, request
):
    request.getfixturevalue(server)

    worker = processes.start("tests.core_workers:modules_of_the_first_lock", using=using)
    assert worker.result() == []
