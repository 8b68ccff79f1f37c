"""What identifies the weights: a digest that two folders share only if they compute the same KV.

Token ids are the key of a block, so the tokenizer and the chat template are no part of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

SIDE_FILE = "weights-digests.json"
EDGE_BYTES = 1 << 20
SAMPLE_BYTES = 4096
SAMPLES = 64
_ENTRIES_MAX = 256
_READ_BYTES = 4 << 20
_HASH_THREADS = 4

# Fields that cannot change a key or value vector. What is not listed counts: a needless miss costs time,
# a wrong hit costs the answer.
_INERT_FIELDS = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "hidden_dropout",
        "initializer_range",
        "max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)


class _Known(msgspec.Struct, frozen=True):
    digest: str
    sample: str


def weight_files(model: Path) -> list[Path]:
    """The files that hold the weights: all safetensors of a folder, or the GGUF file itself."""
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]


def _other_weights(model: Path) -> list[Path]:
    """What other engines load where there are no safetensors."""
    return sorted(file for form in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in model.glob(form))


def identify(model: Path, *, cache_folder: Path | None = None) -> str:
    """Digest of the weights of `model` (a folder, or a GGUF file), as hex: part of the namespace of every block.

    With a `cache_folder` the second call reads only samples: the digest of a file is remembered under its
    device, inode, size, mtime and ctime (which no program can set back), and confirmed by hashing the
    first and last MiB and 64 pages between. Raises OSError, also where there are no weights.
    """
    files = weight_files(model) or _other_weights(model)
    if not files:
        raise FileNotFoundError(f"no weights in {model}")
    settings = _arithmetic_fields(model / "config.json") if model.is_dir() else b""
    return _digest(b"workmem.weights.1\0", settings, model, files, cache_folder)


def identify_adapter(folder: Path, *, cache_folder: Path | None = None) -> str:
    """Digest of a LoRA adapter's files and settings, as `identify` is of a model's. Raises OSError."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise FileNotFoundError(f"no weights in {folder}")
    settings = (folder / "adapter_config.json").read_bytes()
    return _digest(b"workmem.adapter.1\0", settings, folder, files, cache_folder)


def _digest(kind: bytes, settings: bytes, place: Path, files: list[Path], cache_folder: Path | None) -> str:
    known = _read_side_file(cache_folder)
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        results = list(pool.map(_file_digest, files, [known] * len(files)))
    if cache_folder is not None and any(known.get(key) != entry for key, entry in results):
        _write_side_file(cache_folder, known | dict(results))
    weights = hashlib.sha256(kind)
    weights.update(settings)
    for file, (_, entry) in zip(files, results, strict=True):
        name = file.name if place.is_dir() else ""
        weights.update(f"{name}\0{entry.digest}\0".encode())
    return weights.hexdigest()


def _arithmetic_fields(config: Path) -> bytes:
    fields: dict[str, Any] = json.loads(config.read_bytes())
    kept = {name: value for name, value in fields.items() if name not in _INERT_FIELDS}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _file_digest(file: Path, known: dict[str, _Known]) -> tuple[str, _Known]:
    stat = file.stat()
    key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    sample = _sample_digest(file, stat.st_size)
    entry = known.get(key)
    if entry is not None and entry.sample == sample:
        return key, entry
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(_READ_BYTES):
            digest.update(piece)
    return key, _Known(digest.hexdigest(), sample)


def _sample_digest(file: Path, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb", buffering=0) as stream:
        for offset, length in _sample_spans(size):
            digest.update(os.pread(stream.fileno(), length, offset))
    return digest.hexdigest()


def _sample_spans(size: int) -> Iterable[tuple[int, int]]:
    yield 0, EDGE_BYTES
    yield max(0, size - EDGE_BYTES), EDGE_BYTES
    for index in range(SAMPLES):
        yield size * (index + 1) // (SAMPLES + 1), SAMPLE_BYTES


def _read_side_file(folder: Path | None) -> dict[str, _Known]:
    if folder is None:
        return {}
    # An unreadable side file only costs the time of hashing again.
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / SIDE_FILE).read_bytes(), type=dict[str, _Known])
    return {}


def _write_side_file(folder: Path, entries: dict[str, _Known]) -> None:
    newest = dict(list(entries.items())[-_ENTRIES_MAX:])
    # A full or read-only disk must not stop the start: the next start hashes again.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{SIDE_FILE}.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(newest))
        draft.replace(folder / SIDE_FILE)
