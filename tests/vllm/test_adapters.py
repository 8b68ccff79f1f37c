"""Digests of adapters: taken once, and anew when a file is another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from workmem.engines.vllm import adapters
from workmem.engines.vllm.adapters import AdapterDigests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "adapter"
    made.mkdir()
    (made / "adapter_model.safetensors").write_bytes(b"weights")
    (made / "adapter_config.json").write_bytes(b"{}")
    return made


def test_a_digest_is_taken_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    digests, taken = AdapterDigests(), []
    monkeypatch.setattr(adapters, "identify_adapter", lambda *_, **__: taken.append(1) or "digest")
    assert [digests.of(str(folder)) for _ in range(3)] == ["digest"] * 3
    assert len(taken) == 1


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_it_is_another_one_when_a_file_was_written_to_or_replaced(folder: Path, name: str):
    digests = AdapterDigests()
    first = digests.of(str(folder))
    (folder / name).write_bytes(b"{ }    ")
    second = digests.of(str(folder))
    other = folder / "draft"
    other.write_bytes(b"{  }   ")
    other.replace(folder / name)
    assert len({first, second, digests.of(str(folder))}) == 3


def test_one_that_cannot_be_read_is_said(tmp_path: Path):
    with pytest.raises(OSError, match="nowhere"):
        AdapterDigests().of(str(tmp_path / "nowhere"))
