"""All agents work through their conversations once, against one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from workmem.demo.chat import Answer, ask
from workmem.demo.runs import AgentRun


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request of one agent and its answer."""

    agent: str
    number: int
    answer: Answer


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass over the load took. `turns` are in order of (agent, number)."""

    name: str
    start_s: float
    """Seconds from starting the server to its first answer; not part of `wall_s`."""
    wall_s: float
    turns: tuple[Turn, ...]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Who works, and how."""

    runs: tuple[AgentRun, ...]
    model: str
    max_tokens: int
    concurrency: int
    """Most requests in flight at a time; agents take turns in order of arrival."""


async def work(
    load: Load, url: str, *, reuse: bool, on_turn: Callable[[Turn], None]
) -> tuple[tuple[Turn, ...], float]:
    """Let every agent take all its turns; return them and the seconds they took together.

    Each turn sends the recorded history up to an assistant message and then goes on with the
    recorded message, so all phases see the same prompts whatever the model answers.
    """
    room = asyncio.Semaphore(load.concurrency)
    # No limit on a request's time: on a slow machine a long prompt takes minutes.
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def agent(run: AgentRun) -> list[Turn]:
            turns: list[Turn] = []
            for number, end in enumerate(run.turns):
                async with room:
                    body = _body(load, run, run.messages[:end], reuse=reuse)
                    turn = Turn(agent=run.name, number=number, answer=await ask(session, url, body))
                turns.append(turn)
                on_turn(turn)
            return turns

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            agents = [group.create_task(agent(run)) for run in load.runs]
        wall_s = time.perf_counter() - start
    return tuple(turn for task in agents for turn in task.result()), wall_s


async def warm_up(load: Load, url: str) -> None:
    """Pay for what a process does only once (kernels, buffers) before anything is timed."""
    body = _body(load, load.runs[0], ({"role": "user", "content": "Hello."},), reuse=False)
    async with aiohttp.ClientSession() as session:
        await ask(session, url, body)


def _body(load: Load, run: AgentRun, messages: Sequence[dict[str, Any]], *, reuse: bool) -> dict[str, Any]:
    return {
        "model": load.model,
        "messages": list(messages),
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "user": run.name,
        "workmem": {"reuse": reuse},
    }
