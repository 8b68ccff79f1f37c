"""Peers in processes of their own that are killed, or freeze, in the middle of a batch."""

from __future__ import annotations

import base64
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest

from workmem.testing.transfer_faults import Lent
from workmem.testing.transfer_peer import CALL_BYTES, InTheMiddle, new_endpoint, start
from workmem.testing.waiting import wait_until
from workmem.transfer.contract import Access, Outcome, Part
from workmem.transfer.region import RemoteWindow
from workmem.transfer.shared_memory import SharedMemoryMover, allocate

KINDS = pytest.mark.parametrize("kind", ["shared", "mooncake"])
FILL, OTHER = 0x5A, 0xC3
WAIT_S, SHORT_S = 10.0, 0.2
SIZES = {"shared": 3 * 2**20, "mooncake": 3 * CALL_BYTES}
"""More than one call of either mover."""


@pytest.fixture
def mover_of(engines):
    def made(kind, at=0, **more):
        if kind == "shared":
            return SharedMemoryMover()
        return Lent(engines[at], **more)

    return made


@contextmanager
def endpoint_of(kind, mover):
    endpoint = new_endpoint(kind, mover)
    memory = allocate(SIZES[kind])
    try:
        yield endpoint, memory.view, endpoint.register(memory)
    finally:
        endpoint.close(SHORT_S)


@contextmanager
def process_of(kind, **more):
    peer = start(kind, SIZES[kind], **more)
    try:
        yield peer
    finally:
        peer.end()


def is_full_of(byte, memory):
    return not np.any(np.frombuffer(memory, np.uint8) != byte)


def ticket_of(window):
    return base64.b64encode(window.ticket).decode()


@KINDS
def test_a_writer_that_is_killed_is_gone_and_its_memory_free_once_nothing_can_arrive(kind, mover_of):
    with (
        process_of(kind, middle="SIGKILL") as peer,
        endpoint_of(kind, mover_of(kind, drain_s=0.5)) as (endpoint, memory, region),
    ):
        window = endpoint.grant(region, 0, len(memory), Access.WRITE)
        peer.tell(ticket=ticket_of(window), fill=FILL)
        assert window.wait(0, len(memory), WAIT_S) is Outcome.PEER_GONE
        assert memory[0] == FILL
        assert memory[-1] != FILL
        assert window.close(WAIT_S) is Outcome.DONE
        if kind == "mooncake":
            assert time.monotonic() >= window.peer.lost_at + 0.5
        memory[:] = bytes([OTHER]) * len(memory)
        time.sleep(SHORT_S)
        assert is_full_of(OTHER, memory)


@KINDS
def test_a_writer_that_freezes_keeps_its_window_until_it_goes_on_and_harms_nobody_then(kind, mover_of):
    with (
        process_of(kind, middle="SIGSTOP") as peer,
        endpoint_of(kind, mover_of(kind)) as (endpoint, memory, region),
    ):
        size = len(memory)
        window = endpoint.grant(region, 0, size, Access.WRITE)
        peer.tell(ticket=ticket_of(window), fill=FILL)
        wait_until(lambda: memory[0] == FILL, WAIT_S)
        assert window.wait(0, size, SHORT_S) is Outcome.TIMED_OUT
        assert window.close(SHORT_S) is Outcome.TIMED_OUT
        assert endpoint.quarantined_bytes == size
        assert endpoint.unregister(region) is Outcome.REFUSED
        peer.send(signal.SIGCONT)
        wait_until(lambda: window.is_free, WAIT_S)
        memory[:] = bytes([OTHER]) * size
        assert peer.answer() == {"outcome": "refused"}
        time.sleep(SHORT_S)
        assert is_full_of(OTHER, memory)
        # The process is as good as any other again.
        again = endpoint.grant(region, 0, 4096, Access.WRITE)
        peer.tell(ticket=ticket_of(again), fill=FILL)
        assert peer.answer() == {"outcome": "done"}
        assert again.close(WAIT_S) is Outcome.DONE


@KINDS
def test_an_owner_that_is_killed_is_gone_and_what_was_read_is_not_believed(kind, mover_of):
    mover = mover_of(kind, settle_s=0.3)
    with process_of(kind) as peer:
        killing = InTheMiddle(mover, 2, lambda: peer.send(signal.SIGKILL))
        with endpoint_of(kind, killing) as (endpoint, memory, region):
            windows = {access: granted(peer, endpoint, len(memory) // 4, access) for access in Access}
            window = granted(peer, endpoint, len(memory), Access.READ)
            moving = endpoint.read(window, region, [Part(0, 0, len(memory))], WAIT_S)
            assert moving.wait() == (Outcome.PEER_GONE,)
            assert moving.wait_over(WAIT_S)
            for access, move in ((Access.WRITE, endpoint.write), (Access.READ, endpoint.read)):
                assert move(windows[access], region, [Part(0, 0, 8)], WAIT_S).wait() == (Outcome.PEER_GONE,)


@KINDS
def test_an_owner_that_is_killed_takes_what_was_written_along(kind, mover_of):
    mover = mover_of(kind, settle_s=0.3)
    with process_of(kind) as peer:
        killing = InTheMiddle(mover, 2, lambda: peer.send(signal.SIGKILL))
        with endpoint_of(kind, killing) as (endpoint, memory, region):
            window = granted(peer, endpoint, len(memory), Access.WRITE)
            moving = endpoint.write(window, region, [Part(0, 0, len(memory))], WAIT_S)
            assert moving.wait() == (Outcome.PEER_GONE,)
            assert moving.wait_over(WAIT_S)


@KINDS
def test_an_owner_that_freezes_costs_one_deadline_and_others_nothing(kind, mover_of):
    mover = mover_of(kind, settle_s=0.3)
    with process_of(kind) as peer, endpoint_of(kind, mover_of(kind, at=1)) as (other, _, others):
        freezing = InTheMiddle(mover, 2, lambda: peer.send(signal.SIGSTOP))
        with endpoint_of(kind, freezing) as (endpoint, memory, region):
            window = granted(peer, endpoint, len(memory), Access.WRITE)
            healthy = endpoint.open(other.grant(others, 0, 4096, Access.WRITE).ticket, WAIT_S)
            started = time.monotonic()
            moving = endpoint.write(window, region, [Part(0, 0, len(memory))], 1.0)
            assert endpoint.write(healthy, region, [Part(0, 0, 4096)], WAIT_S).wait() == (Outcome.DONE,)
            assert moving.wait() == (Outcome.TIMED_OUT,)
            assert time.monotonic() - started < WAIT_S / 2
            if kind == "mooncake":
                # The engine itself still waits: the next batch does not, and memory is not one's own yet.
                assert not moving.is_over
                waited = time.monotonic()
                late = endpoint.write(window, region, [Part(0, 0, 8)], WAIT_S)
                assert late.wait() == (Outcome.TIMED_OUT,)
                assert time.monotonic() - waited < WAIT_S / 2
            peer.send(signal.SIGCONT)
            assert moving.wait_over(WAIT_S)
            assert moving.wait() == (Outcome.TIMED_OUT,)


def granted(peer, endpoint, size, access):
    """A window of the process, open."""
    peer.tell(grant=size, access=access)
    window = endpoint.open(base64.b64decode(peer.answer()["ticket"]), WAIT_S)
    assert isinstance(window, RemoteWindow)
    return window
