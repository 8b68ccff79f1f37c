"""Folders of the user's that several layers share."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for what can be made again (`$XDG_CACHE_HOME/workmem`, by default `~/.cache/workmem`)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "workmem"
