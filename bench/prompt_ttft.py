"""Time to first token of a turn whose keys are in the order of the turn before it, and of one whose keys are not.

Each pair is a conversation of its own for every arm, of the same length: its first turn is computed, then later turns are
sent, which differ in their last words alone. One token is asked for: what is measured is all that stands before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from harness import in_turns
from prompt_load import end_of, listens
from prompt_peers import TEMPLATE
from prompt_traps import body_of, continued, keys_shuffled
from vllm_report import paired
from vllm_systems import free_port

from workmem.demo.server import running_server

SAME, SHUFFLED, WITHOUT = "keys in order", "keys shuffled", "keys shuffled, canonical off"
ARMS = (SAME, SHUFFLED, WITHOUT)
AIM = 1.01
TOOLS = 4
VLLM_START_S = 300.0
_ANSWER_S = aiohttp.ClientTimeout(total=300)


class Turns(NamedTuple):
    """How much is asked."""

    pairs: int
    turns: int
    """Later turns of each conversation."""


@asynccontextmanager
async def embedded(model: Path, log: Path) -> AsyncGenerator[str]:
    """Our server with its own engine."""
    async with running_server([f"engine.model={model}"], log) as url:
        yield url


@asynccontextmanager
async def before_vllm(model: Path, python: Path, folder: Path, dtype: str) -> AsyncGenerator[str]:
    """Our server in front of vLLM on a CPU. Raises OSError where vLLM does not start."""
    port = free_port()
    command = vllm_command(model, python, port, dtype)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment
        )
    try:
        await listens(port, process, VLLM_START_S)
        settings = [f"upstream.urls=http://127.0.0.1:{port}"]
        async with running_server(settings, folder / "front.log") as url:
            yield url
    finally:
        await end_of(process)


def vllm_command(model: Path, python: Path, port: int, dtype: str) -> list[str]:
    """What starts it; its template prints tools, which the model's own does not."""
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "8192", "--dtype", dtype, "--enforce-eager", "--enable-prompt-tokens-details"),
        *("--chat-template", str(TEMPLATE), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]


async def measure(
    url: str, turns: Turns, seed: int, numbers: Sequence[int]
) -> AsyncGenerator[dict[str, Any]]:
    """Pair by pair: of each arm the times of its later turns, and the tokens that they found."""
    async with AsyncExitStack() as running:
        session = await running.enter_async_context(aiohttp.ClientSession(timeout=_ANSWER_S))
        async with session.get(f"{url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        await _ask(session, url, _first(model, seed, "warm up", 0))
        for number in numbers:
            chance = random.Random(f"{seed}-{number}")
            samples: list[dict[str, Any]] = []
            firsts = {arm: _first(model, seed, arm, number) for arm in ARMS}
            for arm in in_turns(ARMS, number):
                await _ask(session, url, firsts[arm], arm)
            for turn in range(turns.turns):
                for arm in in_turns(ARMS, number + turn):
                    # What an engine without the rules finds is another prompt each time: one is enough.
                    if arm == WITHOUT and turn:
                        continue
                    body = continued(firsts[arm])
                    body["messages"][-1]["content"] += f" This is request number {100 + turn}."
                    sent = body if arm == SAME else keys_shuffled(body, chance)
                    samples.append({"arm": arm, "turn": turn, **await _ask(session, url, sent, arm)})
            yield {"pair": number, "samples": samples}


def _first(model: str, seed: int, arm: str, number: int) -> dict[str, Any]:
    """A conversation that shares nothing with others, and is as long."""
    place = ARMS.index(arm) if arm in ARMS else 9
    body = body_of(seed, tools=TOOLS, about=f"Desk {100 + number} of hall {place}. ")
    # Tools come first in some templates: they have to differ too.
    for tool in body["tools"]:
        function = tool["function"]
        function["description"] = f"Desk {100 + number} of hall {place}. {function['description']}"
    return body | {"model": model, "max_tokens": 1}


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], arm: str = SAME
) -> dict[str, Any]:
    extra: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if arm == WITHOUT:
        extra["workmem"] = {"canonical": "off"}
    data = json.dumps(body | extra).encode()
    headers = {"content-type": "application/json"}
    first_s, usage = None, None
    start = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", data=data, headers=headers) as answer:
        if answer.status != 200:
            raise OSError(f"status {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or time.perf_counter() - start
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
    if first_s is None or usage is None:
        raise OSError("a stream without a token, or without usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {"ttft_s": first_s, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}


def summed(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The share that each arm found, and shuffled over unshuffled, turn by turn, with its bound."""
    shares: dict[str, list[float]] = {arm: [] for arm in ARMS}
    matched: list[tuple[float, float]] = []
    contrast: list[tuple[float, float]] = []
    for pair in pairs:
        found = {(one["arm"], one["turn"]): one for one in pair["samples"]}
        for (arm, turn), one in found.items():
            if one["cached_tokens"] is not None:
                shares[arm].append(one["cached_tokens"] / one["prompt_tokens"])
            if arm == SHUFFLED and (SAME, turn) in found:
                matched.append((one["ttft_s"], found[SAME, turn]["ttft_s"]))
            if arm == WITHOUT and (SAME, turn) in found:
                contrast.append((one["ttft_s"], found[SAME, turn]["ttft_s"]))
    ratio = paired(matched)
    return {
        "share": {arm: sum(each) / len(each) if each else None for arm, each in shares.items()},
        "shuffled_of_same": ratio,
        "meets_aim": bool(ratio) and ratio["upper"] is not None and ratio["upper"] <= AIM,
        "without_of_same": paired(contrast),
    }
