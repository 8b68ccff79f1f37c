"""Shared fixtures. The real model is prepared once per machine and shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from workmem.config import cache_dir


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct (`make model` prepares it; this does too where it is missing)."""
    from workmem.engines.embedded.prepare import prepare

    return prepare("smollm2-135m-instruct", cache_dir())
