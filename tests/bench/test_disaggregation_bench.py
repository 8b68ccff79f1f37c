"""What a window of load counts, and what windows come to."""

from __future__ import annotations

import asyncio

import aiohttp
import disaggregation
import pytest
from aiohttp import web
from disaggregation import Window

SEEN = web.AppKey("seen", list)
EVENT = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'


class Prompts:
    """Stands for texts: a prompt that has its length."""

    def prompt(self, tokens):
        return [7] * tokens


async def streamed(request):
    """Four tokens, 20 ms apart; those of a long prompt come after 0.2 s, and the third request is refused."""
    seen = request.app[SEEN]
    length = len((await request.json())["prompt"])
    seen.append(length)
    number = len(seen)
    if number == 3:
        return web.Response(status=503)
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    if length == disaggregation.LONG_PROMPT:
        await asyncio.sleep(0.2)
    for _ in range(4):
        await answer.write(EVENT)
        await asyncio.sleep(0.02)
    await answer.write(
        b'data: {"error": {}}\n\n' if number == 4 else b'data: {"choices": [], "usage": {}}\n\n'
    )
    await answer.write(b"data: [DONE]\n\n")
    return answer


def test_a_window_counts_the_time_between_tokens_and_that_to_the_first_of_long_prompts(monkeypatch):
    monkeypatch.setattr(disaggregation, "LONG_PAUSE_S", 0.05)
    seen: list[int] = []

    async def run() -> Window:
        app = web.Application()
        app[SEEN] = seen
        app.router.add_post("/v1/completions", streamed)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as session:
            window = Window(session, f"http://127.0.0.1:{port}", Prompts(), 0.6)
            await window.run()
        await runner.cleanup()
        return window

    window = asyncio.run(run())
    streams = [length for length in seen if length == disaggregation.STREAM_PROMPT]
    assert window.failed == 2
    # Three gaps for each stream that was not refused: the time to its first token is none.
    assert len(window.gaps) == 3 * window.tokens / 4
    assert window.tokens in {4 * len(streams), 4 * (len(streams) - 1)}
    assert all(ttft >= 0.2 for ttft in window.long_ttft)


def entry(arm, gaps, number=0):
    counted = {"window": number, "wall_s": 10.0, "tokens": 50, "long_ttft_s": [2.0], "failed": 0}
    return counted | {"arm": arm, "gaps_s": gaps}


def test_arms_are_told_over_all_their_windows():
    entries = {
        "0|both": entry("both", [0.1] * 99 + [3.0]),
        "1|both": entry("both", [0.1] * 100, 1),
        "0|disaggregated": entry("disaggregated", [0.1] * 100),
    }
    both, apart = disaggregation.summarise(entries)
    assert (both["windows"], apart["windows"]) == (2, 1)
    assert both["itl_s"]["max"] == 3.0
    assert both["itl_s"]["p50"] == apart["itl_s"]["p99"] == pytest.approx(0.1)
    assert both["itl_p99_by_window_s"][0] > 2.9
    assert apart["tokens_per_s"] == 5.0
    assert disaggregation.table([both, apart]).row_count == 2
    assert disaggregation.summarise({}) == []
