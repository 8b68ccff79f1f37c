"""Both movers pass the suite of transfers."""

from __future__ import annotations

import functools

import pytest

from workmem.testing.transfer_suite import TransferSuite
from workmem.transfer.endpoint import Endpoint
from workmem.transfer.mooncake_engine import MooncakeMover
from workmem.transfer.shared_memory import SharedMemoryMover


def same(mover):
    return mover


class TestSharedMemory(TransferSuite):
    def make(self, mover=same, **more) -> Endpoint:
        return Endpoint(mover(SharedMemoryMover()), **more)


class Lent:
    """An engine that outlives the endpoints that use it: each takes a while to start."""

    def __init__(self, mover: MooncakeMover) -> None:
        self._mover = mover

    def __getattr__(self, name):
        return getattr(self._mover, name)

    def close(self) -> None:
        pass


@functools.cache
def engines() -> tuple[MooncakeMover, MooncakeMover]:
    return MooncakeMover("127.0.0.1"), MooncakeMover("127.0.0.1")


class TestMooncake(TransferSuite):
    @pytest.fixture(autouse=True)
    def _turns(self):
        self.made = 0

    def make(self, mover=same, **more) -> Endpoint:
        self.made += 1
        return Endpoint(mover(Lent(engines()[self.made % 2])), host="127.0.0.1", **more)
