"""Two engines of Mooncake for all tests: each takes a while to start and to end."""

from __future__ import annotations

import pytest

from workmem.testing.transfer_peer import new_mover


@pytest.fixture(scope="session")
def engines():
    pair = new_mover("mooncake"), new_mover("mooncake")
    yield pair
    for engine in pair:
        engine.close()
