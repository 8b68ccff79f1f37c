"""What a check of a server says."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """How it is with one thing."""

    OK = "ok"
    WARN = "warn"
    """It costs reuse, or will."""
    FAIL = "fail"
    """No reuse where there must be some, or a count that cannot be true."""
    UNKNOWN = "unknown"
    """Not to be told from outside."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    check: str
    verdict: Verdict
    seen: str
    """What was observed, with numbers."""
    advice: str = ""
    """What to do; empty where nothing is to be done."""


def ok(check: str, seen: str) -> Finding:
    """Nothing to do."""
    return Finding(check=check, verdict=Verdict.OK, seen=seen)


def warn(check: str, seen: str, advice: str) -> Finding:
    """It costs reuse."""
    return Finding(check=check, verdict=Verdict.WARN, seen=seen, advice=advice)


def fail(check: str, seen: str, advice: str) -> Finding:
    """To be mended."""
    return Finding(check=check, verdict=Verdict.FAIL, seen=seen, advice=advice)


def unknown(check: str, seen: str, advice: str = "") -> Finding:
    """Not to be told from outside."""
    return Finding(check=check, verdict=Verdict.UNKNOWN, seen=seen, advice=advice)
