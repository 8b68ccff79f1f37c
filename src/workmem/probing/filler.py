"""Texts that nobody has sent before: what is found again of them was kept since the first time."""

from __future__ import annotations

import hashlib

_WORDS = (
    *("river", "stone", "winter", "garden", "market", "letter", "window", "silver", "engine", "harbour"),
    *("teacher", "morning", "forest", "pencil", "island", "yellow", "captain", "village", "summer", "basket"),
    *(
        "mountain",
        "station",
        "carpet",
        "doctor",
        "kitchen",
        "ladder",
        "machine",
        "orange",
        "planet",
        "rabbit",
    ),
    *("season", "ticket", "valley", "wagon", "bridge", "candle", "desert", "family", "guitar", "hammer"),
)


class Filler:
    """Words drawn from a seed. Each topic begins with a word of its own, so two of them share nothing."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def text(self, topic: str, words: int) -> str:
        """So many words. A longer text of the same topic begins with the shorter one."""
        drawn = [hashlib.sha256(f"{self._seed}/{topic}".encode()).hexdigest()[:8]]
        while len(drawn) < words:
            digest = hashlib.sha256(f"{self._seed}/{topic}/{len(drawn)}".encode()).digest()
            drawn += [_WORDS[byte % len(_WORDS)] for byte in digest]
        return " ".join(drawn[:words])
