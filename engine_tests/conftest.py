"""What the tests on real engines share. They run in the engine's own environment: `make test-engines`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="0-1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--model", help="folder of another model than SmolLM2-135M-Instruct, one of full attention"
    )


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """Folder of SmolLM2-135M-Instruct, prepared by `make model`, or of the model that was asked for."""
    if request.config.getoption("--model"):
        return Path(request.config.getoption("--model"))
    from workmem.config import cache_dir
    from workmem.engines.embedded.prepare import prepare

    return prepare("smollm2-135m-instruct", cache_dir())
