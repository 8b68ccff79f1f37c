"""Digests of adapters: taken once, and anew when a file is another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from workmem.engines.vllm import adapters
from workmem.engines.vllm.adapters import AdapterDigests, Adapters


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


@pytest.fixture
def known() -> Adapters:
    return Adapters(AdapterDigests())


def write(folder: Path, weights: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(weights)


def test_files_that_change_under_an_adapter_that_is_loaded_are_not_taken_for_it(
    folder: Path, known: Adapters
):
    """VLLM goes on with what it has read: its blocks are of the old files, or, after it had to make room, of the new."""
    first = known.of("a", 1, str(folder), is_read_again=False)
    assert first == f"a:{AdapterDigests().of(str(folder))}"
    write(folder, b"other weights")
    assert known.of("a", 1, str(folder), is_read_again=False) is None
    known.emptied()
    assert known.of("a", 1, str(folder), is_read_again=False) is None
    write(folder, b"weights")
    assert known.of("a", 1, str(folder), is_read_again=False) == first


@pytest.mark.parametrize("number", [2, 1])
def test_blocks_of_the_files_of_before_are_not_kept_as_those_of_the_new_ones(
    folder: Path, known: Adapters, number: int
):
    """VLLM tells adapters apart by name and path alone: it takes its own blocks of before for a hit."""
    is_read_again = number == 1
    first = known.of("a", 1, str(folder), is_read_again=False)
    write(folder, b"other weights")
    assert known.of("a", number, str(folder), is_read_again=is_read_again) is None
    known.emptied()
    second = known.of("a", number, str(folder), is_read_again=is_read_again)
    assert second is not None
    assert second != first
    assert known.of("a", number, str(folder), is_read_again=is_read_again) == second
