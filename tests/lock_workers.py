"""What the worker processes of the exclusion and fault tests do."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from distlock_app import BackendError, Leader, Lock, LockBusy, LockLost
from distlock_app.core.registry import registry
from tests.processes import hear, say


def bump(path):
    """Add 1 to the number in a file, as unprotected as can be; return the new number."""
    file = Path(path)
    value = int(file.read_text() or 0) + 1
    sleep(0.0005)  # where an update would be lost
    spare = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    spare.write_text(str(value))
    spare.replace(file)
    return value


def count(path, name, times, threads, using, ttl=10.0):
    """Bump the file under the lock `times` times in each of `threads` threads."""
    done, errors = [], []

    def work():
        try:
            for _ in range(times):
                with Lock(name, using=using, wait=100, ttl=ttl):
                    done.append(bump(path))
        except BaseException as error:
            errors.append(repr(error))

    pool = [threading.Thread(target=work) for _ in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return {"done": done, "errors": errors}


def count_until_killed(path, name, using, ttl, log):
    """Bump the file under the lock for ever, and log each number that was written."""
    with open(log, "a") as lines:
        say("counting")
        while True:
            with suppress(LockBusy, LockLost), Lock(name, using=using, wait=30, ttl=ttl):
                lines.write(f"{bump(path)}\n")
                lines.flush()


def hold(name, using, ttl, renew=True):
    """Hold the lock until told to release it, and report what became of it."""
    lost_at = []
    held = Lock(name, using=using, ttl=ttl, renew=renew).acquire(wait=30)
    held.on_lost(lambda _: lost_at.append(monotonic()))
    say({"fence": held.fence})
    while (order := hear()) != "release":
        if order == "state":
            say({"lost": held.lost, "told": bool(lost_at)})
    try:
        held.release()
        return "released"
    except LockLost:
        return "lost"
    except BackendError:
        return "unknown"


def hold_and_write_late(name, using, ttl):
    """Take the lock, get stopped, and write with the fence in the belief of still holding it."""
    from tests.app.models import Counter

    held = Lock(name, using=using, ttl=ttl).acquire(wait=30)
    say(held.fence)
    hear()  # stopped and continued while waiting here
    written = Counter.objects.filter(name=name, value__lt=held.fence).update(value=held.fence)
    return {"written": written, "lost": held.lost}


def take_once(name, using, ttl, wait):
    """Take the lock once; return when it was got, by the clock that all processes share."""
    say("waiting")
    with Lock(name, using=using, ttl=ttl, wait=wait):
        return monotonic()


def resume(text):
    """Go on with a lock that was handed over, and release it; return its fence."""
    with Lock.resume(text) as hold:
        hold.extend()
        return hold.fence


def fork_under_a_lock(name, using, ttl):
    """Return what a child found, which took locks and ended while its parent held one."""
    from tests.core_workers import in_child

    held = Lock(name, using=using, ttl=ttl).acquire()

    def work():
        with Lock(f"{name}-other", using=using, ttl=ttl) as other:
            other.extend()
        return "busy" if Lock(name, using=using, ttl=ttl).try_acquire() is None else "taken"

    found = in_child(work)
    held.extend()
    held.release()
    return found


def contend(name, using, seconds):
    """Take the lock again and again, holding it 1 ms; return every wait in seconds."""
    lock = Lock(name, using=using, wait=60)
    waits = []
    end = monotonic() + seconds
    while (asked := monotonic()) < end:
        with lock:
            waits.append((asked, monotonic()))
            sleep(0.001)
    return waits


def contend_in_children(number, name, using, seconds):
    """Let forked children contend, which start faster than processes; return each one's waits."""
    gate, start = os.pipe()
    answers = []
    for _ in range(number):
        mine, theirs = os.pipe()
        if os.fork() == 0:
            _contend_in_child(gate, start, theirs, (name, using, seconds))
        os.close(theirs)
        answers.append(mine)
    os.close(gate)
    os.close(start)  # all at once
    return [json.loads(Path(f"/dev/fd/{answer}").read_text()) for answer in answers]


def _contend_in_child(gate, start, told, arguments):
    try:
        os.close(start)
        os.read(gate, 1)
        with os.fdopen(told, "w") as answer:
            json.dump(contend(*arguments), answer)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def grab_new_names(names, using):
    """Take and release each name; return the errors that reached the caller."""
    errors = []
    for name in names:
        try:
            with Lock(name, using=using, wait=60):
                pass
        except Exception as error:
            errors.append(repr(error))
    return errors


INTERRUPTED, HELPLESS = 10, 11  # exit codes


def interrupt_children(number, using, ttl):
    """Fork children that take and release a lock for ever; interrupt each; tell how they ended.

    Return how many said that they were interrupted, and the locks of those who were so at the
    call of `__exit__`, before its first line: there Python lets no code of ours run.
    """
    chance = random.Random(3)
    interrupted, helpless = 0, []
    registry[using].backend.ping()  # here, or each child would import the driver anew
    registry[using].backend.close()
    for child in range(number):
        name = f"interrupted-{child}"
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            _take_until_interrupted(name, using, ttl, told)
        os.close(told)
        while os.read(ready, 1):  # it goes on: Python ignores an exception in a finalizer
            sleep(chance.uniform(0.0, 0.02))
            os.kill(pid, signal.SIGINT)
            if not select.select([ready], [], [], 30)[0]:
                os.kill(pid, signal.SIGABRT)  # says where it hangs
        os.close(ready)
        ended_by = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        interrupted += ended_by in (INTERRUPTED, HELPLESS)
        if ended_by == HELPLESS:
            helpless.append(name)
    return {"interrupted": interrupted, "helpless": helpless}


def _take_until_interrupted(name, using, ttl, told):
    heard = False

    def interrupt(*_):
        nonlocal heard
        heard = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    parent = os.getppid()
    try:
        lock = Lock(name, using=using, ttl=ttl)
        with lock:
            os.write(told, b"!")
        while os.getppid() == parent:  # it may be killed
            with lock:
                pass
            if heard:
                heard = False
                os.write(told, b"!")
        os._exit(2)
    except KeyboardInterrupt as error:
        *_, (frame, line), _ = traceback.walk_tb(error.__traceback__)
        leaving = Lock.__exit__.__code__
        at_the_call = frame.f_code is leaving and line == leaving.co_firstlineno
        os._exit(HELPLESS if at_the_call else INTERRUPTED)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def lead(name, using, ttl):
    """Say when this process leads; until SIGTERM."""

    def work(ended):
        say("leads")
        ended.wait()

    leader = Leader(name, work, using=using, ttl=ttl)
    signal.signal(signal.SIGTERM, lambda *_: leader.stop())
    leader.run()


def count_until_told(path, name, using):
    """Bump the file under the lock until the test says something; return the numbers."""
    using = tuple(using) if isinstance(using, list) else using
    told = threading.Event()

    def listen():
        hear()
        told.set()

    threading.Thread(target=listen, daemon=True).start()
    say("counting")
    done = []
    while not told.wait(0.01):  # or others, who look now and then on SQLite, would never come
        with Lock(name, using=using, wait=100):
            done.append(bump(path))
    return done
