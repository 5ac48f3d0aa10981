"""Counts calls, bytecodes and system calls, which do not vary as times do."""

from __future__ import annotations

import select
import sys

from django.db import connections

import distlock_app
from distlock_app import Lock
from distlock_app.primitives import rlock
from tests.engines import running

PACKAGE = distlock_app.__path__[0]
POLL = type(select.poll())


def pair(lock):
    lock.acquire().release()


def block(lock):
    with lock:
        pass


def new(lock):
    with Lock("a", using=lock.using):
        pass


def fewest(work, install, counted, *, warm=50, tries=7):
    """Return how many events `counted` of the tracer sees in a warm `work`, at the least.

    In a thread of its own, with one connection that is not in use: what other tests have left
    behind is not counted, and neither is a collection of garbage in all of the tries.
    """
    answers = []

    def measure():
        _ = connections["default"]
        for _ in range(warm):
            work()
        for _ in range(tries):
            count = 0

            def tracer(frame, event, arg):
                nonlocal count
                frame.f_trace_opcodes = True
                count += counted(frame, event)
                return tracer

            before = sys.gettrace() if install is sys.settrace else sys.getprofile()
            install(tracer)
            try:
                work()
            finally:
                install(before)
            answers.append(count)

    with running(measure):
        pass
    return min(answers)


def methods_called(work, *kinds, look=lambda called: None):
    """Return which methods of objects of these kinds `work` calls in this thread, in order."""
    done = []

    def tracer(frame, event, arg):
        if event == "c_call" and isinstance(arg.__self__, kinds):
            done.append(arg.__name__)
            look(arg.__self__)

    before = sys.getprofile()
    sys.setprofile(tracer)
    try:
        work()
    finally:
        sys.setprofile(before)
    return done


def is_call(frame, event):
    # Each mutex is a call more on Python 3.14, which no other version needs.
    return event == "call" and frame.f_code.co_filename != rlock.__file__


def is_own_call(frame, event):
    return is_call(frame, event) and frame.f_code.co_filename.startswith(PACKAGE)


def is_bytecode(frame, event):
    return event == "opcode"
