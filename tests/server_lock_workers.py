"""What worker processes do with the locks of a database server."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading

from distlock_app import Lock, LockError
from tests.processes import hear, say


def outlive_a_child(using, at_exit):
    """Fork a child while holding a lock and having an idle session; report what is left."""
    kept = Lock("idle", using=using).acquire()
    hold = Lock("forked", using=using, ttl=5).acquire()
    kept.release()
    faulthandler.cancel_dump_traceback_later()  # its thread is missed at the child's exit
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        answers = [_try(hold.extend), _try(hold.release)]
        with Lock("mine", using=using) as mine:
            answers.append(mine.lost)
        del hold, kept, mine
        gc.collect()
        os.write(tell, repr(answers).encode())
        if at_exit == "exit":
            sys.exit()  # the interpreter frees what it has
        os._exit(0)
    answers = os.read(told, 1000).decode()
    _, status = os.waitpid(child, 0)
    say({"child": answers, "status": status, "number": hold._lease.grant.session.number})
    hear()  # the test has looked at the server
    hold.extend()
    lost = hold.lost
    hold.release()
    return lost


def _try(verb):
    try:
        verb()
    except LockError as error:
        return type(error).__name__


def fences(name, using, times):
    """Take the lock `times` times; return every fence with the time of the release before."""
    found = []
    for _ in range(times):
        with Lock(name, using=using, wait=60) as hold:
            found.append(hold.fence)
    return found


def hold_until_told(name, using, ttl):
    """Hold the lock; say the fence, and, when asked, whether its loss was told soon."""
    told = threading.Event()
    hold = Lock(name, using=using, ttl=ttl).acquire(wait=30)
    hold.on_lost(lambda _: told.set())
    say(hold.fence)
    hear()
    say(told.wait(10) and hold.lost)
    os._exit(0)
