"""The Nth send fails, on either end, for every N: it costs misses and dropped saves, and nothing that lasts."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
from contextlib import suppress

import pytest

from workmem.core.errors import LeaseError, TransferError
from workmem.testing.pages import Chain, namespace, read_all, settle
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

STEP = int(os.environ.get("FAIL_STEP", "4"))
"""Of the places to fail at, a run takes every so many, the first of them by its seed; 1 takes all."""

CHAIN, OTHER = Chain(namespace(), 3), Chain(namespace(), 2, seed=1)


class Sends:
    """Counts what both ends put on a socket. One of it ends half-way, as when the other end is gone."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.fail_at = 0
        for name in ("sendall", "send"):
            patch.setattr(socket.socket, name, self._counted(getattr(socket.socket, name)))
        patch.setattr(socket, "send_fds", self._refusing(socket.send_fds))

    def _is_refused(self) -> bool:
        with self._lock:
            self.count += 1
            return self.count == self.fail_at

    def _counted(self, send):
        def counted(connection, body, *flags):
            if self._is_refused():
                with suppress(OSError):
                    send(connection, body[: len(body) // 2], *flags)
                raise BrokenPipeError("half of it was sent")
            return send(connection, body, *flags)

        return counted

    def _refusing(self, send):
        def counted(*how):
            if self._is_refused():
                raise BrokenPipeError("nothing was sent")
            return send(*how)

        return counted


def test_failing_the_nth_send_costs_misses_and_nothing_that_lasts(host, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    server = host.serve(ssd=0)
    sends, number, fired = Sends(monkeypatch), random.randrange(STEP) + 1 - STEP, True
    while fired:
        number += STEP
        sends.count, sends.fail_at = 0, number
        live(host)
        fired, sends.fail_at = sends.count >= number, 0
        # A block that a lost client was about to write is taken for there until it is known lost.
        wait_until(lambda: is_all_back(server), 10)
        look_again(host)
        host.store.purge(lambda space: True)
        assert number < 200
    assert number > 15
    wait_until(lambda: is_all_back(server), 10)
    # Two frames or three a lost connection: those that a process that lives may still be writing.
    assert server._census()["store_host_stranded_frames"] <= 3 * number


def live(host) -> None:
    """One client's life: attach, save, read, strike, let go. Any call may meet the failure."""
    try:
        # Half a request is waited for at both ends: by the server until this client has had enough.
        client = host.client(call_s=1)
    except TransferError:
        return
    client.register(CHAIN.space)
    with suppress(TimeoutError):
        CHAIN.save(client, timeout_s=1.0)
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="t", ttl_s=60)
    settle(lease)
    with suppress(LeaseError):
        lease.quarantine(2)
    lease.release()
    read_all(client, CHAIN.root, CHAIN.keys)
    with suppress(TimeoutError):
        OTHER.save(client, timeout_s=1.0)
    client.gauges()
    client.close()


def look_again(host) -> None:
    """Another client saves and reads all; the store adds up."""
    client = host.client(call_s=20)
    for chain in (CHAIN, OTHER):
        chain.save(client)
        assert read_all(client, chain.root, chain.keys) == len(chain.keys)
    client.audit()
    client.close()


def is_all_back(server) -> bool:
    """No lease is left, and no frame but those that wait for a process to be done or dead."""
    held = server._census()
    return (
        held["store_host_leases"] == held["store_host_connections"] == 0
        and held["store_host_reservations"] == held["store_host_stranded_frames"]
    )
