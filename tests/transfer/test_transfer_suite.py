"""Both movers pass the suite of transfers."""

from __future__ import annotations

import pytest

from workmem.testing.transfer_faults import Lent
from workmem.testing.transfer_suite import TransferSuite
from workmem.transfer.endpoint import Endpoint
from workmem.transfer.shared_memory import SharedMemoryMover


def same(mover):
    return mover


class TestSharedMemory(TransferSuite):
    def make(self, mover=same, **more) -> Endpoint:
        return Endpoint(mover(SharedMemoryMover()), **more)


class TestMooncake(TransferSuite):
    @pytest.fixture(autouse=True)
    def _turns(self, engines):
        self.engines, self.made = engines, 0

    def make(self, mover=same, **more) -> Endpoint:
        self.made += 1
        return Endpoint(mover(Lent(self.engines[self.made % 2])), host="127.0.0.1", **more)
