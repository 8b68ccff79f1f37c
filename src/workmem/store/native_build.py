"""C sources, compiled on the machine that runs them, for its own instruction set.

A library is built once and kept in a folder under the digest of sources, compiler, flags and processor.
Whoever uses one has a slower way for machines without a compiler.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_BUILD_SECONDS_MAX = 120


class Library(NamedTuple):
    """What a library is made of."""

    name: str
    flags: Sequence[str]
    """For every source."""
    sources: Mapping[Path, Sequence[str]]
    """Each with the flags that are for it alone."""
    headers: Sequence[Path] = ()
    """What the sources include and is not the system's."""


def find_compiler() -> str | None:
    """Path of the machine's C compiler; None where there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build_library(compiler: str, library: Library, cache_dir: Path) -> Path:
    """The file of `library`, from `cache_dir` if it lies there. A second or two where it does not.

    Raises OSError with what the compiler says, or subprocess.SubprocessError where it does not end.
    """
    target = cache_dir / f"{library.name}-{_identity(compiler, library)}.so"
    if target.exists():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as work:
        built, objects = Path(work) / "library.so", list[str]()
        for source, own_flags in library.sources.items():
            objects.append(str(Path(work) / f"{source.stem}.o"))
            _run([compiler, *library.flags, *own_flags, "-c", str(source), "-o", objects[-1]])
        # Without the flags: what they would link, OpenMP above all, the process has loaded already.
        _run([compiler, "-shared", *objects, "-o", str(built), "-lm"])
        built.replace(target)
    return target


def _identity(compiler: str, library: Library) -> str:
    parts = [compiler.encode(), " ".join(library.flags).encode(), _processor()]
    parts += [header.read_bytes() for header in library.headers]
    for source, own_flags in library.sources.items():
        parts += [" ".join(own_flags).encode(), source.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(  # noqa: S603 - the compiler this machine's PATH names
        command, capture_output=True, text=True, timeout=_BUILD_SECONDS_MAX, check=False
    )
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()[:400]}")


def _processor() -> bytes:
    """What -march=native depends on."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor().encode() + platform.machine().encode()
    return "\n".join(
        sorted({line for line in info.splitlines() if line.startswith(("flags", "model name"))})
    ).encode()
