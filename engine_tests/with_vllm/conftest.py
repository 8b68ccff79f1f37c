"""Fixtures of the tests on real vLLM."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from harness import Engine, Host


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    # Not pytest's folder: the address of a socket is short.
    with tempfile.TemporaryDirectory(prefix="wm-") as folder:
        made = Host(Path(folder))
        made.start()
        yield made
        made.stop()


@pytest.fixture(scope="module")
def engine(host: Host, smollm2: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine of a test file; `ENGINE` in the file are more arguments for `LLM`."""
    made = Engine(host, smollm2, **getattr(request.module, "ENGINE", {}))
    assert not made.connector._guard.off
    assert not made.worker._guard.off
    yield made
    made.llm.llm_engine.engine_core.shutdown()
