"""Which vLLM this was written for and run with."""

from __future__ import annotations

SUPPORTED = ("0.32", "0.33")
"""Run for real, and held against the signatures of its wheel: see SUPPORT.toml."""


def minor_of(version: str) -> str:
    """`major.minor` of a version."""
    return ".".join(version.split(".")[:2])


def refusal(version: str) -> str:
    """Why this version is not taken; empty when it is."""
    if minor_of(version) in SUPPORTED:
        return ""
    return f"vLLM {version} is not one of {', '.join(SUPPORTED)}: update workmem, or install one of these"
