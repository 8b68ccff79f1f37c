"""`workmem version`: what a bug report needs first."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from workmem import __version__

_PARTS = ("torch", "transformers", "msgspec", "numpy", "starlette", "uvicorn")


def version() -> None:
    """Print the versions of workmem and of what it runs on."""
    sys.stdout.write(f"workmem {__version__}\npython {platform.python_version()} on {platform.platform()}\n")
    for name in _PARTS:
        try:
            sys.stdout.write(f"{name} {metadata.version(name)}\n")
        except metadata.PackageNotFoundError:
            sys.stdout.write(f"{name} not installed\n")
