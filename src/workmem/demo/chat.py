"""One streamed chat completion, timed at the client."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import msgspec

from workmem.core.errors import EngineError


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back, and when. Seconds count from the moment the request was sent."""

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    completion_tokens: int
    tokens_by_source: dict[str, int]


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """Stream `body` through `url`/v1/chat/completions. Raises EngineError on any other status than 200."""
    payload = body | {"stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    first = None
    text: list[str] = []
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/v1/chat/completions", json=payload) as response:
        if response.status != 200:
            raise EngineError(f"the server answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                continue
            chunk = msgspec.json.decode(line[5:])
            if "error" in chunk:
                raise EngineError(f"the server failed in mid-stream: {chunk['error']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice["delta"]
                text.append(delta.get("content") or "")
                if first is None and (text[-1] or delta.get("tool_calls") or choice["finish_reason"]):
                    first = time.perf_counter()
    end = time.perf_counter()
    return Answer(
        text="".join(text),
        ttft_s=(first or end) - start,
        total_s=end - start,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        tokens_by_source=usage.get("workmem", {}).get("tokens_by_source", {}),
    )
