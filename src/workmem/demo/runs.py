"""The load of the demo: recorded agent runs, cut into turns and chosen to fit a token budget."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import msgspec

Message = dict[str, Any]

CHARS_PER_TOKEN = 3.3
"""Of these conversations under a small model's tokenizer; only sizes the load, never counts it."""


class AgentRun(msgspec.Struct, frozen=True):
    """One agent's whole conversation. Turn i is a request holding all messages before `turns[i]`."""

    name: str
    messages: tuple[Message, ...]

    @property
    def turns(self) -> tuple[int, ...]:
        """Indices of the recorded assistant messages: before each of them the model is asked."""
        return tuple(i for i, message in enumerate(self.messages) if message["role"] == "assistant")

    @property
    def estimated_tokens(self) -> int:
        """Prompt tokens of all turns together, roughly."""
        return sum(estimate_tokens(self.messages[:turn]) for turn in self.turns)


class _Recorded(msgspec.Struct):
    task_id: int
    trial: int
    traj: tuple[Message, ...]


def estimate_tokens(messages: tuple[Message, ...]) -> int:
    """Tokens of `messages`, roughly."""
    return int(sum(len(msgspec.json.encode(message)) for message in messages) / CHARS_PER_TOKEN)


def airline_runs() -> list[AgentRun]:
    """All recorded airline runs that ship with the package."""
    lines = files("workmem.demo").joinpath("data/airline.jsonl").read_bytes().splitlines()
    recorded = [msgspec.json.decode(line, type=_Recorded) for line in lines]
    return [AgentRun(f"airline task {run.task_id}, trial {run.trial}", run.traj) for run in recorded]


def choose(runs: list[AgentRun], *, agents: int, tokens_max: int) -> list[AgentRun]:
    """At most `agents` runs whose turns stay within `tokens_max` prompt tokens together.

    The first run that fits comes with it whatever its length, so that one agent grows long; the
    others are the shortest ones that still fit.
    """
    by_size = sorted(runs, key=lambda run: run.estimated_tokens)
    reserve = sum(run.estimated_tokens for run in by_size[: agents - 1])
    longest = [run for run in by_size[agents - 1 :] if run.estimated_tokens + reserve <= tokens_max][-1:]
    chosen, left = longest, tokens_max - sum(run.estimated_tokens for run in longest)
    for run in by_size:
        if len(chosen) == agents:
            break
        if run not in chosen and run.estimated_tokens <= left:
            chosen = [*chosen, run]
            left -= run.estimated_tokens
    return chosen
