"""What stands in for poll() on Windows tells what poll() tells."""

from __future__ import annotations

import select
import socket

import pytest

from distlock_app.primitives.polling import POLLIN, POLLOUT, Selecting, readable
from distlock_app.primitives.timing import monotonic


@pytest.fixture(params=[select.poll, Selecting])
def poll(request):
    return request.param()


@pytest.fixture
def sockets():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_what_can_be_read_or_written_is_told_as_it_is_asked_for(poll, sockets):
    reader, writer = sockets
    reader.send(b"not asked for")
    poll.register(reader, POLLIN)
    poll.register(writer.fileno(), POLLOUT)
    assert poll.poll(None) == [(writer.fileno(), POLLOUT)]

    writer.send(b"asked for")
    both = [(reader.fileno(), POLLIN), (writer.fileno(), POLLOUT)]
    assert sorted(poll.poll(0)) == sorted(both)

    poll.unregister(writer.fileno())
    assert poll.poll(None) == both[:1]


def test_who_reads_a_socket_that_is_closed_is_told(poll, sockets):
    reader = sockets[0].fileno()
    poll.register(reader, POLLIN)
    sockets[0].close()

    assert [file for file, _ in poll.poll(None)] == [reader]


@pytest.mark.parametrize("number", [0, 1])
def test_nothing_is_waited_for_as_long_as_asked(poll, sockets, number):
    for one in sockets[:number]:
        poll.register(one, POLLIN)
    began = monotonic()

    assert poll.poll(20) == []

    assert monotonic() - began >= 0.019


def test_the_end_can_be_read(sockets):
    assert not readable(sockets[0], 0)

    sockets[1].close()

    assert readable(sockets[0], 60)
