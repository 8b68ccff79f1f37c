"""C sources of the store, compiled on the machine that runs them, for its own instruction set.

A library is built once and kept in a folder under the digest of source, compiler, flags and processor.
Whoever uses one has a slower way for machines without a compiler.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_BUILD_SECONDS_MAX = 120


def find_compiler() -> str | None:
    """Path of the machine's C compiler; None where there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build_library(compiler: str, source: Path, flags: Sequence[str], cache_dir: Path) -> Path:
    """The shared library of `source`, from `cache_dir` if it lies there. Under a second where it does not.

    Raises OSError with what the compiler says, or subprocess.SubprocessError where it does not end.
    """
    identity = b"\0".join([source.read_bytes(), compiler.encode(), " ".join(flags).encode(), _processor()])
    name = source.stem.replace("_", "-")
    target = cache_dir / f"{name}-{hashlib.sha256(identity).hexdigest()[:24]}.so"
    if target.exists():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as work:
        built = Path(work) / "library.so"
        command = [compiler, *flags, "-shared", str(source), "-o", str(built)]
        done = subprocess.run(  # noqa: S603 - the compiler this machine's PATH names
            command, capture_output=True, text=True, timeout=_BUILD_SECONDS_MAX, check=False
        )
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()[:400]}")
        built.replace(target)
    return target


def _processor() -> bytes:
    """What -march=native depends on."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor().encode() + platform.machine().encode()
    return "\n".join(
        sorted({line for line in info.splitlines() if line.startswith(("flags", "model name"))})
    ).encode()
