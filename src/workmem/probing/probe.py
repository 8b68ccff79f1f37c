"""A session of probing: what is asked, what it has cost so far, and what earlier checks have learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from workmem.probing.asks import Ask, ChatApi, MessagesApi, Reading, Tool
from workmem.probing.filler import Filler
from workmem.probing.server import Refused, Server

GENERATED_MAX = 280
"""Tokens of the longest answer that is asked for."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What it may cost at most."""

    requests_max: int = 36
    long_tokens: int = 1200
    """Of the longest prompt, about."""

    @property
    def prompt_tokens(self) -> int:
        """Of all requests together; half of it where blocks are small."""
        return 26 * self.long_tokens

    @property
    def generated_tokens(self) -> int:
        """Of all answers together."""
        return 3 * GENERATED_MAX + self.requests_max


class Spent(Exception):
    """As many requests or tokens were sent as were announced."""


class Probe:
    """See the module."""

    def __init__(
        self, server: Server, api: ChatApi | MessagesApi, model: str, plan: Plan, seed: str, context: int = 0
    ) -> None:
        """`context`: the longest prompt that the server takes, 0 where it does not say."""
        self.server = server
        self.api = api
        self.model = model
        self.plan = plan
        self.filler = Filler(seed)
        self.long_tokens = min(plan.long_tokens, context * 6 // 10) if context else plan.long_tokens
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.tokens_per_word = 1.5
        self.reports = False
        """Whether answers say how many tokens were cached."""
        self.counts = server.hits_counted() is not None
        """Whether its metrics do."""
        self.caches: bool | None = None
        """None where that cannot be told."""
        self.block = 0
        """Tokens by which it reuses; 0 where that is not known."""
        self.head = 0
        """Cached tokens of prompts that share nothing but the template's first words."""
        self.has_thought = False
        """Whether an answer had thinking in it."""
        self.is_workmem = False
        self.tools_id = ""
        """Id of an answer whose prompt had tools."""

    @property
    def step(self) -> int:
        """The block where it is known, else a usual one."""
        return self.block or 16

    @property
    def middle_tokens(self) -> int:
        """Of a prompt in which some blocks can be told apart."""
        return min(self.long_tokens, max(400, 12 * self.step))

    def text(self, topic: str, tokens: float) -> str:
        """A text of about so many tokens that no other topic shares."""
        return self.filler.text(topic, max(4, int(tokens / self.tokens_per_word)))

    def ask(
        self,
        system: str,
        user: str | Sequence[dict[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int = 1,
        more: dict[str, Any] | None = None,
    ) -> Reading:
        """Ask, and read how much of the prompt was cached. Raises Refused, Spent."""
        messages = [{"role": "user", "content": user}] if isinstance(user, str) else list(user)
        asked = Ask(
            system=system, messages=messages, tools=tuple(tools), max_tokens=max_tokens, more=more or {}
        )
        counted = None if self.reports or not self.counts else self.server.hits_counted()
        reading = self._sent(asked)
        if reading.cached is not None:
            self.reports = True
        elif counted is not None and (now := self.server.hits_counted()) is not None:
            reading = msgspec.structs.replace(reading, cached=int(now - counted))
        self.prompt_tokens += reading.prompt_tokens or 0
        self.generated_tokens += reading.completion_tokens or 0
        self.has_thought = self.has_thought or bool(reading.thinking) or "</think>" in reading.text
        return reading

    def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """A request in other words than `ask` has. Raises Refused, Spent."""
        if self.requests >= self.plan.requests_max or self.prompt_tokens >= self.plan.prompt_tokens:
            raise Spent
        self.requests += 1
        return self.server.post(path, body)

    def _sent(self, asked: Ask) -> Reading:
        while True:
            try:
                answer, seconds = self.post(self.api.path, self.api.body(self.model, asked))
            except Refused as refused:
                if refused.status != 400 or not self.api.adapt(refused.said):
                    raise
            else:
                return self.api.read(answer, seconds)
