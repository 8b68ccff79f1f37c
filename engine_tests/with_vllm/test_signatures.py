"""The vLLM that is installed is the one that this was written against, name by name."""

import importlib.util
import tomllib
from pathlib import Path

import msgspec
import pytest

from workmem.engines.vllm.versions import minor_of, refusal
from workmem.testing.signatures import Snapshot, differences, take

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def installed() -> Snapshot:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "run this with the Python that has vLLM: make test-engines"
    assert spec.origin
    touched = tomllib.loads((FOLDER / "touched.toml").read_text(encoding="utf-8"))
    return take(Path(spec.origin).parents[1], touched, version_file="vllm/_version.py")


def test_the_installed_version_is_one_that_is_taken(installed):
    assert refusal(installed.version) == ""


def test_the_installed_vllm_is_that_of_its_snapshot(installed):
    file = FOLDER / "snapshots" / f"{minor_of(installed.version)}.json"
    changed = differences(msgspec.json.decode(file.read_bytes(), type=Snapshot), installed)
    lines = "\n".join(f"{name}: {what}" for name, what in changed.items())
    assert not changed, f"vLLM {installed.version} is not that of {file.name}; judge each change:\n{lines}"
