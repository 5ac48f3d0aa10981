"""Locks in a process whose threads gevent has replaced by greenlets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import pytest
from celery import Celery

from distlock_app import Lock
from tests.engines import until
from tests.launching import ROOT, free_port, launch
from tests.test_demo import somebody_listens

# What a program prints is its result, in JSON.
BEGIN = """
from gevent import monkey
monkey.patch_all()
import json, sys, time
import django
django.setup()
import gevent
from distlock_app import Lock, LockLost
using = sys.argv[1]
seen = []
"""

TAKE_TURNS = """
def first():
    with Lock("a", ttl=3, using=using) as hold:
        seen.append("first")
        gevent.spawn(other)
        time.sleep(4)  # longer than the ttl: it is renewed meanwhile
        seen.append(hold.lost)

def second():
    while not seen:
        time.sleep(0.01)
    with Lock("a", ttl=3, wait=30, using=using):
        seen.append("second")

def other():
    for _ in range(10):
        time.sleep(0.05)
    seen.append("other")

gevent.joinall([gevent.spawn(each) for each in (first, second)], raise_error=True)
print(json.dumps(seen))
"""

COMPUTE = """
try:
    with Lock("a", ttl=1, using=using):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass
except LockLost:
    print(json.dumps("lost"))
"""

TAKE_ONE = """
from django.core.exceptions import ImproperlyConfigured
try:
    hold = Lock("a", using=using).acquire()
except ImproperlyConfigured as error:
    seen.append(str(error))
print(json.dumps([*seen, Lock("a", using=using).locked()]))
"""

LEAD = """
from django.core.exceptions import ImproperlyConfigured
from distlock_app import Leader
def lead():
    try:
        Leader("a", lambda ended: ended.wait(), using=using).run()
    except ImproperlyConfigured as error:
        seen.append(str(error))
leader = gevent.spawn(lead)
while not (seen or Lock("a", using=using).locked()):
    time.sleep(0.01)
print(json.dumps(seen))
"""

WAIT_FOR_A_SILENT_SERVER = """
import os, signal
from distlock_app import BackendError
Lock("a", using=using).acquire().release()
os.kill({pid}, signal.SIGSTOP)

def asks():
    try:
        Lock("a", using=using).acquire(wait=0)
    except BackendError as error:
        seen.append(str(error))

def other():
    time.sleep(0.1)
    seen.append("other")

gevent.joinall([gevent.spawn(each) for each in (asks, other)], raise_error=True)
print(json.dumps(seen))
"""


def greenlets(code, using, **env):
    """Run a program of greenlets; return what it prints, and what it logs."""
    pytest.importorskip("gevent")
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, using],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("using", ["locmem", "redis"])
def test_greenlets_take_turns_and_a_lock_is_renewed_while_its_holder_pauses(using, request):
    if using == "redis":
        request.getfixturevalue("redis_url")

    seen, _ = greenlets(TAKE_TURNS, using)

    assert seen == ["first", "other", False, "second"]


def test_a_greenlet_that_computes_for_longer_than_the_ttl_is_told_that_it_lost_its_lock():
    seen, log = greenlets(COMPUTE, "locmem")

    assert seen == "lost"
    assert log.count("gevent has patched threads") == 1


def test_a_lock_is_refused_if_threads_became_greenlets_after_the_import_of_the_app(monkeypatch):
    patch = "from gevent import monkey\nmonkey.patch_all()\n"  # as a worker of `gunicorn --preload`
    monkeypatch.setattr(f"{__name__}.BEGIN", BEGIN.replace(patch, "") + patch)

    seen, _ = greenlets(TAKE_ONE, "locmem")

    assert [type(each) for each in seen] == [str, bool] and not seen[1]
    assert "patch_all() first" in seen[0]


def test_a_leader_is_refused_among_greenlets():
    # Its event loop would run in all of them: Django refuses the database to a thread with a loop.
    (told,), _ = greenlets(LEAD, "locmem")
    assert told.startswith("gevent has patched threads")


def test_a_silent_server_blocks_only_the_greenlet_that_asks_and_not_forever(own_redis):
    code = WAIT_FOR_A_SILENT_SERVER.replace("{pid}", str(own_redis.pid))
    try:
        seen, _ = greenlets(
            code, "redis", DISTLOCK_TEST_REDIS_URL=f"{own_redis.url}?socket_timeout=1"
        )
    finally:
        own_redis.resume()

    assert seen == ["other", "Redis 'redis' did not answer: TimeoutError."]


def fetched(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_gunicorns_gevent_worker_serves_others_while_a_view_holds_a_lock(redis_url):
    pytest.importorskip("gevent")
    pytest.importorskip("gunicorn")
    site = f"http://127.0.0.1:{(port := free_port())}"
    settings = {"DJANGO_SETTINGS_MODULE": "tests.settings", "TESTS_URLS": "tests.greenlet_site"}
    command = [sys.executable, "-m", "gunicorn", "--worker-class=gevent", "--workers=1"]
    server = launch(
        [*command, f"--bind=127.0.0.1:{port}", "tests.greenlet_site:application"],
        cwd=ROOT,
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: somebody_listens(port) or server.poll() is not None, within=60)
        with ThreadPoolExecutor() as pool:
            slow = pool.submit(fetched, f"{site}/slow")
            until(lambda: Lock("slow", using="redis").locked() or slow.done(), within=60)

            assert fetched(f"{site}/fast") == "fast"
            with pytest.raises(HTTPError, match="423") as answer:
                fetched(f"{site}/slow")
            answer.value.close()
            fetched(f"{site}/end")
            assert slow.result(60) == "held"
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.crowd  # and not with the lowest redis-py, which Celery refuses
def test_tasks_in_celerys_gevent_pool_take_turns_and_their_lock_is_renewed(own_redis, tmp_path):
    pytest.importorskip("gevent")
    env = {"DJANGO_SETTINGS_MODULE": "tests.settings", "DISTLOCK_TEST_REDIS_URL": own_redis.url}
    command = [sys.executable, "-m", "celery", "-A", "tests.greenlet_tasks", "worker"]
    worker = launch(
        [*command, "--pool=gevent", "--concurrency=3", "--loglevel=warning"],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    number = tmp_path / "number"
    number.write_text("0")
    try:
        app = Celery(broker=own_redis.url, backend=own_redis.url, set_as_current=False)
        sent = [app.send_task("count", [str(number)]) for _ in range(3)]

        assert [result.get(timeout=60) for result in sent] == [False] * 3
        assert number.read_text() == "3"
    finally:
        worker.terminate()
        worker.wait(60)
