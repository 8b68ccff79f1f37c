import json
import os
import shutil

import pytest

from workmem.engines import fingerprint
from workmem.engines.fingerprint import identify
from workmem.testing.tiny_models import build_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "model")


@pytest.fixture
def full_reads(monkeypatch):
    """Counts whole-file hashes: the only caller of `_READ_BYTES`-sized reads is wrapped."""
    calls = []
    real = fingerprint._file_digest

    def counted(file, known):
        key, entry = real(file, known)
        calls.append(known.get(key) is not entry)
        return key, entry

    monkeypatch.setattr(fingerprint, "_file_digest", counted)
    return calls


def test_the_place_of_a_model_is_no_part_of_it(llama, folder):
    assert identify(folder) == identify(llama)


def test_other_weights_and_other_arithmetic_are_other_models(folder, tmp_path):
    base = identify(folder)
    assert identify(build_model(tmp_path / "other", seed=1)) != base
    config = folder / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"rms_norm_eps": 0.5}))
    assert identify(folder) != base
    config.write_text(json.dumps(fields | {"transformers_version": "9", "use_cache": False}, indent=7))
    assert identify(folder) == base


def test_the_tokenizer_is_no_part_of_it(folder):
    before = identify(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert identify(folder) == before


def test_a_second_start_reads_samples_only(folder, tmp_path, full_reads):
    first = identify(folder, cache_folder=tmp_path / "cache")
    second = identify(folder, cache_folder=tmp_path / "cache")
    assert first == second
    assert full_reads == [True, False]


def test_a_change_with_restored_mtime_is_noticed(folder, tmp_path):
    file = folder / "model.safetensors"
    first = identify(folder, cache_folder=tmp_path)
    stat = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-3, os.SEEK_END)
        stream.write(b"\x55")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert identify(folder, cache_folder=tmp_path) != first


def test_samples_catch_a_change_that_leaves_every_stamp(folder, tmp_path, monkeypatch):
    file = folder / "model.safetensors"
    first = identify(folder, cache_folder=tmp_path)
    side = tmp_path / fingerprint.SIDE_FILE
    (entry,) = json.loads(side.read_text()).values()
    with file.open("r+b") as stream:
        stream.seek(-3, os.SEEK_END)
        stream.write(b"\x55")
    stat = file.stat()
    key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    side.write_text(json.dumps({key: entry}))
    assert identify(folder, cache_folder=tmp_path) != first


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b"\xff"])
def test_a_broken_side_file_costs_time_only(folder, tmp_path, content):
    (tmp_path / fingerprint.SIDE_FILE).write_bytes(content)
    assert identify(folder, cache_folder=tmp_path) == identify(folder)


def test_a_cache_folder_that_cannot_be_written_costs_time_only(folder, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert identify(folder, cache_folder=blocked) == identify(folder)


def test_an_adapter_is_known_by_its_files_and_settings(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    with pytest.raises(OSError, match="no weights"):
        fingerprint.identify_adapter(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_bytes(b'{"r": 8}')
    first = fingerprint.identify_adapter(folder)
    assert fingerprint.identify_adapter(folder) == first
    (folder / "adapter_config.json").write_bytes(b'{"r": 9}')
    second = fingerprint.identify_adapter(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"others!")
    assert len({first, second, fingerprint.identify_adapter(folder)}) == 3


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.gguf"])
def test_weights_in_other_files_count_as_well(folder, name):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        identify(folder)
    (folder / name).write_bytes(b"one")
    first = identify(folder)
    (folder / name).write_bytes(b"two")
    assert identify(folder) != first
