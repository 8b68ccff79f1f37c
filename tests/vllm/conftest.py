"""Makes what these tests share importable under --import-mode=importlib."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small import open_store

from workmem.store.store import Store


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """An engine that is not closed goes on behind tests that count threads."""
    yield
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("workmem-vllm")]
    for thread in mine:
        thread.join(5)
    assert not any(thread.is_alive() for thread in mine), f"left behind: {mine}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Audited at the end."""
    opened = open_store(tmp_path / "ssd")
    yield opened
    opened.audit()
    opened.close()
