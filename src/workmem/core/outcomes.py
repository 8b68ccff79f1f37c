"""Expected results are values: where tokens came from, and why a block was missed."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class TierName(StrEnum):
    """A medium, nearest to the accelerator first."""

    VRAM = "vram"
    DRAM = "dram"
    SSD = "ssd"
    REMOTE = "remote"


COMPUTED = "computed"
"""Source of tokens that no tier held."""


class MissReason(StrEnum):
    """Why tokens had to be computed."""

    COLD = "cold"
    """Never seen."""
    CHANGED = "changed"
    """An earlier prompt shares the prefix up to here and differs from here on."""
    EVICTED = "evicted"
    """Was held once and had to make room."""
    TAIL = "tail"
    """Shorter than a block, or the last token, which is always computed to get logits."""
    CORRUPT = "corrupt"
    """Held, but failed its check; the copy is quarantined."""
    UNAVAILABLE = "unavailable"
    """Held, but its tier did not deliver."""
    EXPIRED = "expired"
    """The hold on the pages ended before they were used."""
    DISABLED = "disabled"
    """Reuse is off for this request or process."""


class SourceRun(msgspec.Struct, frozen=True):
    """A run of consecutive prompt tokens that came from the same place."""

    source: str
    """A `TierName` value, or `COMPUTED`."""
    tokens: int
    reason: MissReason | None = None
    """Set when `source` is `COMPUTED`."""


class Lookup(msgspec.Struct, frozen=True):
    """The longest resident prefix of the keys asked for."""

    tiers: tuple[TierName, ...] = ()
    """Tier of each hit block, in prefix order."""
    reason: MissReason | None = None
    """Why the first missed block was missed; None if all were hits."""

    @property
    def blocks(self) -> int:
        """Number of hit blocks."""
        return len(self.tiers)
