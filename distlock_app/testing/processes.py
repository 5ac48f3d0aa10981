"""The part of the backends' suite about processes: exclusion between them, and forks."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from random import uniform
from time import sleep
from typing import Any
from unittest import SkipTest

from .suite import Suite

# Seconds after which a child process that does not end is ended.
CHILD_LIVES = 60
# Child processes that compete for one lock.
CHILDREN = 4
# Names that all of them try to take at the same moment, one after the other.
TURNS = 30


class ProcessContract(Suite):
    """What a backend keeps in several processes; see LockBackendContract."""

    def test_one_of_many_processes_has_it_at_a_time(self) -> None:
        self._needs_processes()
        name = self.name()

        with mmap.mmap(-1, 1 + CHILDREN) as counter:  # which the children share

            def work(number: int) -> None:
                counter[1 + number] = 1
                while not all(counter[1:]):  # until all have begun
                    sleep(0)  # no longer: the others would be done meanwhile
                self.count_to_ten(counter, name)

            self._in_children(work)

            assert counter[0] == 10 * CHILDREN, "two processes had it at a time"

    def test_of_processes_that_come_at_once_one_has_it(self) -> None:
        self._needs_processes()
        name = self.name()
        with mmap.mmap(-1, CHILDREN * (1 + TURNS)) as marks:  # which the children share
            self._in_children(partial(self._rush, marks, name))
            self._one_in_each_turn(marks)

    def test_of_threads_that_come_at_once_one_has_it(self) -> None:
        marks, pool = bytearray(CHILDREN * (1 + TURNS)), ThreadPoolExecutor(CHILDREN)
        rushes = [pool.submit(self._rush, marks, self._mine, each) for each in range(CHILDREN)]
        assert [rush.exception(CHILD_LIVES) for rush in rushes] == [None] * CHILDREN
        pool.shutdown()
        self._one_in_each_turn(marks)

    def _rush(self, marks: Any, name: str, number: int) -> None:
        """Try to take each name just when the others do; note in `marks` whether it was had."""
        held: Any = None
        try:
            for turn in range(TURNS + 1):
                marks[number] = turn + 1
                while min(marks[:CHILDREN]) <= turn:  # until all have come
                    sleep(0.0001)  # not 0, which would keep the processors from them
                if held:  # which nobody tries to take any more
                    self.backend.release(held)
                if turn < TURNS:
                    held = self.take_here(f"{name}{turn}")
                    marks[CHILDREN * (turn + 1) + number] = bool(held)
        finally:
            marks[number] = 255  # nobody waits for one that failed

    @staticmethod
    def _one_in_each_turn(marks: Any) -> None:
        had = [sum(marks[at : at + CHILDREN]) for at in range(CHILDREN, len(marks), CHILDREN)]
        assert max(had) <= 1, (
            f"{max(had)} owners have it at a time: acquire() must look and take in one atomic step"
        )

    def test_fences_grow_from_process_to_process(self) -> None:
        self.needs("fences")
        self._needs_processes()
        name = self.name()
        fences = [self._fence_of(name)]

        with mmap.mmap(-1, 8) as last:  # which the child shares

            def work() -> None:
                self._fence_of(name)
                last[:] = self._fence_of(name).to_bytes(8, "big")

            self._join([self._fork(work)])
            fences += [int.from_bytes(last[:], "big"), self._fence_of(name)]

        assert fences == sorted(set(fences)), f"one process after the other had {fences}"

    def _needs_processes(self) -> None:
        """Skip the test for a backend whose locks are in the memory of one process."""
        if self.backend.local:
            raise SkipTest("it does not exclude other processes")

    def _fence_of(self, name: str) -> int:
        grant = self.eventually(lambda: self.take(name))
        self.backend.release(grant)
        fence: int = grant.fence
        return fence

    def test_a_child_process_leaves_to_its_parent_what_the_parent_has(self) -> None:
        name = self.name()
        held = self.take(name)

        def work() -> None:
            assert bool(self.take(name)) is self.backend.local
            self._use_it()

        child = self._fork(work)
        try:
            self._use_it()  # with a shared connection, one would read the answers of the other
        finally:
            self._join([child])

        assert self.backend.extend(held, 30) is True
        assert self.backend.release(held) is True

    def test_a_fork_amid_the_requests_of_other_threads_harms_neither_process(self) -> None:
        done, pool, children = threading.Event(), ThreadPoolExecutor(3), []

        def work() -> None:
            while not done.is_set():
                assert self.backend.release(self.take(self.name())) is True

        works = [pool.submit(work) for _ in range(3)]
        try:
            for _ in range(20):
                sleep(uniform(0.01, 0.03))
                # What a child inherits in a bad state, its first requests meet.
                children.append(self._fork(partial(self._use_it, 5)))
        finally:
            try:
                self._join(children)
            finally:
                done.set()
                wait(works, CHILD_LIVES)

        errors = [each.exception(0) for each in works]
        assert errors == [None] * 3, f"the parent could not go on while a child lived: {errors}"
        pool.shutdown()

    def _use_it(self, times: int = 20) -> None:
        for _ in range(times):
            name = self.name()
            grant = self.eventually(lambda n=name: self.take_here(n))
            assert not self.take_here(name)
            assert self.backend.release(grant) is True
            assert self.backend.release(grant) is False

    def _in_children(self, work: Callable[[int], None]) -> None:
        """Let CHILDREN processes do it at the same time, each with its number."""
        self._join([self._fork(partial(work, number)) for number in range(CHILDREN)])

    def _fork(self, work: Callable[[], None]) -> int:
        """Let a child process do it, and then close its backend; return its pid."""
        if not hasattr(os, "fork"):
            raise SkipTest("there is no fork() here")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork() beside other threads
            child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(CHILD_LIVES)
                work()
                self.backend.close()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return child

    @staticmethod
    def _join(children: list[int]) -> None:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(code == -signal.SIGALRM for code in codes), (
            f"a child process hung for {CHILD_LIVES} s: what it inherited (a connection, an open "
            "file, a mutex that another thread held) has to be replaced in after_fork()"
        )
        assert not any(codes), "a child process failed: its traceback is in the captured stderr"
