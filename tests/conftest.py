"""Shared fixtures. The real model is prepared once per machine and shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workmem.config import cache_dir

# Several test workers and the servers they start share the cores: threads that wait must not spin on them.
# Read when torch is imported, here and in every process started from here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct (`make model` prepares it; this does too where it is missing)."""
    from workmem.engines.embedded.prepare import prepare

    return prepare("smollm2-135m-instruct", cache_dir())
