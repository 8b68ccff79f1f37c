"""Makes what these tests share importable under --import-mode=importlib."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small import open_store

from workmem.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Audited at the end."""
    opened = open_store(tmp_path / "ssd")
    yield opened
    opened.audit()
    opened.close()
