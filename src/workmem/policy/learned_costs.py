"""Costs of a server, learned from what its answers took. Pure: durations are given, no clock is read."""

from __future__ import annotations

import math

from workmem.policy.disaggregation import Costs

LARGE_TOKENS = 256
"""From so many computed tokens on, the time of a request tells what a token costs; below, what a request does."""

# Before anything was measured. A hop that is thought too dear is never tried, so the guesses are friendly ones.
_TOKEN_S, _HOP_S, _HANDED_S = 1e-3, 0.05, 2e-5
_WEIGHT = 0.2
_SECONDS_MAX = 3600.0
_BYTES_PER_TOKEN = 4.0
_BYTES_PER_TOKEN_MIN, _BYTES_PER_TOKEN_MAX = 0.1, 1024.0


class Average:
    """A running mean that forgets: the first values count as a plain mean, later ones with a fixed weight."""

    def __init__(self, prior: float) -> None:
        self.value = prior
        self.samples = 0

    def learn(self, value: float) -> None:
        """Take `value` in. What is no number from 0 up says nothing."""
        if not math.isfinite(value) or value < 0:
            return
        self.samples += 1
        self.value += max(_WEIGHT, 1 / self.samples) * (value - self.value)


class LearnedCosts:
    """Costs of one server. `fleet` answers for what it was not measured at: servers of a fleet are mostly alike."""

    def __init__(self, fleet: LearnedCosts | None = None) -> None:
        self._fleet = fleet
        self.token_s = Average(_TOKEN_S)
        self.hop_s = Average(_HOP_S)
        self.handed_s = Average(_HANDED_S)
        self.recomputed = Average(0.0)
        self.requests = 0

    def learn_computing(self, tokens: int, seconds: float) -> None:
        """`tokens` of a prompt were computed, and `seconds` after it was sent the first token was there.

        One number has two causes. A large prompt teaches what a token costs, a small one what a request does; what is
        already put down to the other cause is left out, but never more than half, so that neither can eat the other up.
        """
        if tokens < 0 or not 0 <= seconds <= _SECONDS_MAX:
            return
        self.requests += 1
        if tokens >= LARGE_TOKENS:
            self.token_s.learn((seconds - min(self._believed_hop_s(), seconds / 2)) / tokens)
        else:
            self.hop_s.learn(seconds - min(tokens * self._believed_token_s(), seconds / 2))
        if self._fleet is not None:
            self._fleet.learn_computing(tokens, seconds)

    def learn_handover(self, tokens: int, seconds: float, computed: int | None = None) -> None:
        """`tokens` computed elsewhere took `seconds` until the first token was there; `computed` were computed here.

        Tokens that were promised and came to nothing count: who computes what was handed over has a dear handover.
        """
        if tokens <= 0 or not 0 <= seconds <= _SECONDS_MAX:
            return
        self.handed_s.learn(max(0.0, seconds - min(self._believed_hop_s(), seconds / 2)) / tokens)
        if computed is not None:
            self.recomputed.learn(min(1.0, max(0, computed) / tokens))
        if self._fleet is not None:
            self._fleet.learn_handover(tokens, seconds, computed)

    def costs(self) -> Costs:
        """What is believed now."""
        return Costs(
            computed_token_s=self._believed_token_s(),
            hop_s=self._believed_hop_s(),
            handed_token_s=self._believed(self.handed_s, self._fleet and self._fleet.handed_s),
            recomputed_share=self._believed(self.recomputed, self._fleet and self._fleet.recomputed),
            samples=self.requests,
        )

    def _believed_token_s(self) -> float:
        return self._believed(self.token_s, self._fleet and self._fleet.token_s)

    def _believed_hop_s(self) -> float:
        return self._believed(self.hop_s, self._fleet and self._fleet.hop_s)

    @staticmethod
    def _believed(own: Average, fleet: Average | None) -> float:
        return own.value if own.samples or fleet is None else fleet.value


class BytesPerToken:
    """How many bytes of a request body make a token of its prompt."""

    def __init__(self) -> None:
        self._ratio = Average(_BYTES_PER_TOKEN)

    def learn(self, body_bytes: int, prompt_tokens: int) -> None:
        """A body of `body_bytes` had `prompt_tokens`, as its server says."""
        if body_bytes <= 0 or prompt_tokens <= 0:
            return
        ratio = body_bytes / prompt_tokens
        self._ratio.learn(min(_BYTES_PER_TOKEN_MAX, max(_BYTES_PER_TOKEN_MIN, ratio)))

    def tokens(self, body_bytes: int) -> int:
        """Expected prompt tokens of a body."""
        return int(max(0, body_bytes) / self._ratio.value)
