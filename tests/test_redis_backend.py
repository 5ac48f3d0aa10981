"""Locks on Redis: owners, fences, what people see, and what stays in the server's memory."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest

import distlock_app
from distlock_app.backends.redis.scripts import lua
from distlock_app.claims import Busy, Grant
from distlock_app.primitives.names import key_of
from distlock_app.testing.claims import a_claim
from tests.redis_workers import Waiter, backend_at

pytest_plugins = ["tests.redis_fixtures"]

BACKENDS = Path(distlock_app.__file__).parent / "backends"
SCRIPTS = sorted(BACKENDS.glob("red*/lua/*.lua"))


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: str(file.relative_to(BACKENDS)))
def test_the_server_takes_every_script(file, server):
    server.script_load(lua(file))


def test_one_owner_at_a_time_in_threads_and_processes(
    processes, redis_url, prefix, server, tmp_path
):
    path = tmp_path / "counter"
    path.write_text("0")

    answers = processes.run(
        "tests.redis_workers:count", count=4, path=str(path), prefix=prefix, times=25, threads=4
    )

    fences = [fence for answer in answers for fence in answer]
    assert path.read_text() == str(4 * 4 * 25)
    assert len(set(fences)) == len(fences) == 4 * 4 * 25
    assert list(server.scan_iter(f"{prefix}:*")) == [f"{prefix}:{{0}}:fence"]
    server.delete(f"{prefix}:{{0}}:fence")


def test_the_second_owner_is_told_when_the_lock_may_be_free(backend):
    backend.acquire(a_claim("a", ttl=10), 0)

    answer = backend.acquire(a_claim("a"), 0)

    assert isinstance(answer, Busy) and 5 < answer.free_in <= 10


def test_the_same_owner_is_granted_again_with_the_same_fence(backend):
    wanted = a_claim("a")

    first, second = backend.acquire(wanted, 0), backend.acquire(wanted, 5)

    assert first.fence == second.fence
    assert second.claim is wanted


def test_release_spares_the_next_owner(backend):
    first = backend.acquire(a_claim("a", ttl=0.02), 0)
    time.sleep(0.03)
    second = backend.acquire(a_claim("a"), 0)

    assert backend.release(first) is False
    assert backend.extend(first, 10) is False
    assert backend.extend(second, 10) is True
    assert second.fence > first.fence


def test_release_may_be_repeated_and_needs_no_grant(backend):
    grant = backend.acquire(a_claim("a"), 0)

    assert backend.release(Grant(a_claim("a"))) is False
    assert backend.release(grant) is True
    assert backend.release(grant) is False


def test_an_extension_never_shortens_a_claim(backend):
    grant = backend.acquire(a_claim("a", ttl=30), 0)

    assert backend.extend(grant, 1)
    assert next(iter(backend.holders(grant.claim.key))).expires_in > 20
    assert backend.extend(grant, 60)
    assert next(iter(backend.holders(grant.claim.key))).expires_in > 50


def test_many_claims_are_extended_in_one_request_each_with_its_own_answer(own):
    backend, server = own
    grants = [backend.acquire(a_claim(f"n{number}"), 0) for number in range(700)]
    backend.release(grants[3])
    server.script_flush()

    answers = backend.extend_many([(grant, 60) for grant in grants])

    assert answers == [number != 3 for number in range(700)]
    assert all(holding.expires_in > 50 for holding in backend.holders())


def test_fences_grow_after_everything_is_lost(own):
    backend, server = own
    fences = []

    for _ in range(3):
        fences.append(backend.acquire(a_claim("a"), 0).fence)
        server.flushall()
    fences.append(backend.acquire(a_claim("a"), 0).fence)

    assert fences == sorted(set(fences))


def test_fences_grow_when_the_clock_is_behind(own):
    backend, server = own
    grant = backend.acquire(a_claim("a"), 0)
    ahead = grant.fence + 3_600_000_000
    server.set("distlock:{0}:fence", ahead)

    assert backend.acquire(a_claim("b"), 0).fence == ahead + 1
    assert backend.acquire(a_claim("c"), 0).fence == ahead + 2


def test_clear_spares_a_lock_that_changed_hands(backend):
    first = backend.acquire(a_claim("a"), 0)
    shown = next(iter(backend.holders(first.claim.key))).version
    backend.release(first)
    second = backend.acquire(a_claim("a"), 0)

    assert backend.clear(second.claim.key, shown) == 0
    assert backend.extend(second, 30)
    assert backend.clear(second.claim.key, str(second.fence)) == 1
    assert backend.extend(second, 30) is False
    assert backend.clear(second.claim.key) == 0
    assert backend.acquire(a_claim("a"), 0).fence > second.fence


def test_clear_gives_the_lock_to_the_next_in_the_queue(backend):
    first = backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    waiter.ask()

    assert backend.clear(first.claim.key) == 1

    assert waiter.granted().fence > first.fence


def test_a_guarded_write_needs_the_lock(backend, server, prefix):
    key = f"{prefix}:stock"
    first = backend.acquire(a_claim("a", ttl=0.02), 0)
    time.sleep(0.03)
    second = backend.acquire(a_claim("a"), 0)

    assert backend.guarded_set(first, key, "of the first") is False
    assert server.get(key) is None
    assert backend.guarded_set(second, key, "of the second", ttl=60) is True
    assert server.get(key) == "of the second" and 0 < server.ttl(key) <= 60
    assert backend.extend(second, 30)


def test_a_guarded_write_can_hand_the_lock_over(backend, server, prefix):
    key = f"{prefix}:stock"
    first = backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    waiter.ask()

    assert backend.guarded_set(first, key, b"7", release=True) is True

    assert server.get(key) == "7"
    assert backend.extend(waiter.granted(), 30)
    assert backend.guarded_set(first, key, "8", release=True) is False


@pytest.mark.parametrize(
    "name", ["job", "JOB", "jób", "job ", "job\0x", "{job}", "j%dob", "\udc80", "ß" * 10_000]
)
def test_any_name_is_locked_under_a_key_of_forty_digits(backend, server, prefix, name):
    grant = backend.acquire(a_claim(name), 0)

    [holding] = backend.holders()
    assert holding.key == key_of(name) and holding.fence == grant.fence
    assert holding.name.isprintable() and len(holding.name) <= 200
    assert server.exists(f"{prefix}:{{0}}:{key_of(name)}")


def test_holders_says_who_has_it_since_when_and_who_waits(backend):
    began = time.monotonic()
    grant = backend.acquire(a_claim("invoice:42", ttl=20), 0)
    Waiter(backend, "invoice:42").ask()
    time.sleep(0.02)

    [holding] = backend.holders(key_of("invoice:42"))

    assert holding.held_for <= time.monotonic() - began + 0.01
    assert (holding.name, holding.alias, holding.waiters) == ("invoice:42", "redis", 1)
    assert holding.holder == json.loads(grant.claim.holder)
    assert holding.version == str(grant.fence)
    assert 10 < holding.expires_in <= 20 and 0.02 <= holding.held_for
    assert list(backend.holders(key_of("another"))) == []


@pytest.mark.parametrize("said", ["5", "[1]", "null", '{"ttl":1e999,"host":{}}', '{"a":' * 100_000])
def test_what_another_client_made_up_of_a_holder_is_not_taken_for_one(
    backend, server, prefix, said
):
    grant = backend.acquire(a_claim("a", ttl=50), 0)
    key = f"{prefix}:{{0}}:{grant.claim.key}"
    owner, fence, *_ = server.get(key).split()
    server.set(key, f"{owner} {fence} {said} a", keepttl=True)

    [holding] = backend.holders(grant.claim.key)

    assert holding.fence == grant.fence
    assert all(isinstance(value, str) for value in holding.holder.values())
    assert backend.release(grant) is True


def test_all_holders_are_found_without_scanning_the_server(own):
    backend, server = own
    grants = [backend.acquire(a_claim(f"n{number}"), 0) for number in range(1200)]
    backend.release(grants.pop())
    server.config_resetstat()

    found = [holding.name for holding in backend.holders()]

    assert sorted(found) == sorted(grant.claim.name for grant in grants)
    commands = server.info("commandstats")
    assert "cmdstat_scan" not in commands and "cmdstat_keys" not in commands


def test_the_permissions_in_the_documentation_are_enough(own):
    """Whatever a script or a request asks for: what is denied is in the server's log."""
    _, server = own
    page = Path(__file__).parent.parent / "docs/how-to/redis.md"
    rules = re.search(r"ACL SETUSER locks on >password (.*?)```", page.read_text(), re.S)[1]
    newer = tuple(map(int, server.info()["redis_version"].split(".")[:2])) >= (7, 2)
    more = re.findall(r"add `(.client.setinfo)`", page.read_text()) if newer else []
    server.execute_command("ACL", "SETUSER", "locks", "on", ">password", *rules.split(), *more)
    options = server.get_connection_kwargs()
    backend = backend_at(f"redis://locks:password@{options['host']}:{options['port']}/0")

    for kind in ({}, {"shared": True}, {"limit": 2}):
        grant = backend.acquire(a_claim("a", **kind), 0)
        waiter = Waiter(backend, "a")
        waiter.ask()
        [held] = backend.holders()
        assert [h.fence for h in backend.page(0, 10)[0]] == [grant.fence]
        assert backend.prolong(held.key, held.version, 60)
        assert backend.extend(grant, 60) and backend.release(grant)
        assert backend.clear(waiter.granted().claim.key) == 1
    assert len(backend.acquire_all([a_claim("a"), a_claim("b")])) == 2
    passing = a_claim("c", latch=True, limit=1, wake=lambda grant: None)
    assert not backend.acquire(passing, 30)
    backend.release(Grant(passing))
    assert backend.count_down(passing) == backend.counted(passing.key) == 1
    backend.ping()
    backend.close()

    assert server.acl_log() == []


def test_values_are_text_that_people_can_read(backend, server, prefix):
    grant = backend.acquire(a_claim("naïve ☂"), 0)
    lock = f"{prefix}:{{0}}:{grant.claim.key}"

    value = server.get(lock)

    assert value == f"{grant.claim.owner} {grant.fence} {grant.claim.holder} naïve ☂"


def test_every_key_expires_but_the_counter(backend, server, prefix):
    first = backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    waiter.ask()

    keys = sorted(server.scan_iter(f"{prefix}:*"))
    lasting = [key for key in keys if server.ttl(key) == -1]

    assert len(keys) == 5 and lasting == [f"{prefix}:{{0}}:fence"]
    backend.release(first)
    backend.release(waiter.granted())
    assert list(server.scan_iter(f"{prefix}:*")) == lasting


def test_a_last_try_leaves_no_place_in_the_queue(backend, server, prefix):
    backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    waiter.ask()

    assert not backend.acquire(waiter.claim, 0)

    assert list(server.scan_iter(f"{prefix}:*:[qw]")) == []


def test_a_held_lock_takes_less_than_400_bytes(own):
    backend, server = own
    holder = '{"host":"web-1","pid":12345,"thread":"MainThread"}'
    backend.release(backend.acquire(a_claim("warm"), 0))
    before = server.info("memory")["used_memory"]

    for number in range(5000):
        wanted = dataclasses.replace(a_claim(f"invoice:{number}", ttl=300), holder=holder)
        backend.acquire(wanted, 0)

    assert (server.info("memory")["used_memory"] - before) / 5000 < 400


def test_names_that_expired_leave_nothing_in_memory(own):
    backend, server = own
    backend.release(backend.acquire(a_claim("warm"), 0))
    before = server.info("memory")["used_memory"]

    for number in range(5000):
        backend.acquire(a_claim(f"invoice:{number}", ttl=0.5), 0)

    deadline = time.monotonic() + 30
    while server.dbsize() > 1 or server.info("memory")["used_memory"] > before + 50_000:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.keys() == ["distlock:{0}:fence"]


def test_stale_names_leave_the_index_while_others_are_held(own):
    backend, server = own
    held = backend.acquire(a_claim("held"), 0)
    [index] = server.keys("distlock:{0}:held:*")
    server.zadd(index, {f"{number:040x}": 1 for number in range(300)})

    for _ in range(600):
        backend.release(backend.acquire(a_claim("held", owner=held.claim.owner), 0))

    assert server.zcard(index) == 0
