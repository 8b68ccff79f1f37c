"""How long a prompt token takes to compute here, learned from what was seen."""

from __future__ import annotations

from collections import deque
from statistics import median

_SAMPLES_MAX = 64
_TOKENS_MIN = 32
"""Of a request that teaches: with fewer, its first token's time is that of everything else."""


class PrefillSpeed:
    """The median of the latest requests, so that one that had to wait does not spoil it."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_SAMPLES_MAX)

    def observe(self, computed_tokens: int, first_token_s: float) -> None:
        """A request that computed so many tokens had its first one after so long."""
        if computed_tokens >= _TOKENS_MIN and first_token_s > 0:
            self._seconds.append(first_token_s / computed_tokens)

    def milliseconds(self, tokens: int) -> float | None:
        """What so many tokens take; None before anything was seen."""
        return round(1000 * tokens * median(self._seconds), 1) if self._seconds else None
