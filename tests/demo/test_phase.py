"""Agents against a server that streams what a real one streams, over loopback."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from rich.console import Console

from workmem.core.errors import EngineError
from workmem.demo import report
from workmem.demo.chat import ask
from workmem.demo.phase import Load, Phase, work
from workmem.demo.runs import AgentRun
from workmem.demo.server import running_server


class Scripted:
    """Answers every chat with two words and counts what it was asked."""

    def __init__(self, *, status: int = 200, error: str = "", delay_s: float = 0.0) -> None:
        self.bodies: list[dict] = []
        self.in_flight = 0
        self.in_flight_max = 0
        self._status = status
        self._error = error
        self._delay_s = delay_s

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self._status != 200:
            return web.Response(status=self._status, text="busy")
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": still here\n\n")
        await self._chunk(response, {"choices": [_choice({"role": "assistant", "content": ""})]})
        await asyncio.sleep(self._delay_s)
        if self._error:
            await self._chunk(response, {"error": {"message": self._error}})
            return response
        for word in ("well", " done"):
            await self._chunk(response, {"choices": [_choice({"content": word})]})
        await self._chunk(response, {"choices": [_choice({}, "length")]})
        prompt = 10 * len(body["messages"])
        computed = prompt if not body["workmem"]["reuse"] else 10
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": 2,
            "workmem": {"tokens_by_source": {"computed": computed, "dram": prompt - computed}},
        }
        await self._chunk(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self.in_flight -= 1
        return response

    @staticmethod
    async def _chunk(response: web.StreamResponse, chunk: dict) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def _choice(delta: dict, finish_reason: str | None = None) -> dict:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def conversation(name: str, turns: int) -> AgentRun:
    messages: list[dict[str, str]] = [{"role": "system", "content": "policy"}]
    for number in range(turns):
        messages += [
            {"role": "user", "content": f"{name} {number}"},
            {"role": "assistant", "content": f"recorded {number}"},
        ]
    return AgentRun(name, tuple(messages))


def load_of(*runs: AgentRun, concurrency: int = 2) -> Load:
    return Load(runs=runs, model="m", max_tokens=2, concurrency=concurrency)


async def run_phase(server: Scripted, load: Load, *, reuse: bool) -> Phase:
    seen = []
    async with server.serving() as url:
        turns, wall_s = await work(load, url, reuse=reuse, on_turn=seen.append)
    assert len(seen) == len(turns)
    return Phase(name="reuse on" if reuse else "reuse off", start_s=0.0, wall_s=wall_s, turns=turns)


def test_every_turn_sends_the_recorded_history():
    server = Scripted()
    phase = asyncio.run(run_phase(server, load_of(conversation("a", 3), concurrency=1), reuse=True))
    assert [len(body["messages"]) for body in server.bodies] == [2, 4, 6]
    assert server.bodies[2]["messages"][2]["content"] == "recorded 0"
    assert all(body["temperature"] == 0 and body["workmem"] == {"reuse": True} for body in server.bodies)
    assert [turn.answer.text for turn in phase.turns] == ["well done"] * 3


def test_agents_interleave_within_the_bound():
    server = Scripted(delay_s=0.01)
    runs = tuple(conversation(name, 3) for name in "abcd")
    asyncio.run(run_phase(server, load_of(*runs), reuse=True))
    assert server.in_flight_max == 2
    first_four = {body["user"] for body in server.bodies[:4]}
    assert first_four == set("abcd")


def test_time_to_first_token_counts_from_the_request_to_the_first_text():
    server = Scripted(delay_s=0.05)
    phase = asyncio.run(run_phase(server, load_of(conversation("a", 1)), reuse=False))
    answer = phase.turns[0].answer
    assert 0.05 <= answer.ttft_s <= answer.total_s


@pytest.mark.parametrize(
    ("server", "message"),
    [(Scripted(status=429), "answered 429: busy"), (Scripted(error="out of paper"), "out of paper")],
)
def test_a_failing_server_is_told_as_it_failed(server: Scripted, message: str):
    async def one() -> None:

        async with server.serving() as url, aiohttp.ClientSession() as session:
            await ask(session, url, {"messages": [], "workmem": {"reuse": True}})

    with pytest.raises(EngineError, match=message):
        asyncio.run(one())


def test_the_table_counts_tokens_by_tier_and_compares_with_the_first_phase():
    load = load_of(conversation("a", 2), conversation("b", 1))
    phases = [asyncio.run(run_phase(Scripted(), load, reuse=reuse)) for reuse in (False, True)]
    off, on = report.summarise(phases)
    assert (off.prompt_tokens, off.computed_tokens, off.hit_rate) == (80, 80, 0.0)
    assert (on.computed_tokens, on.hit_rate_by_tier) == (30, {"dram": 50 / 80})
    assert off.speed_up == 1.0
    assert on.same_answers == on.turns == 3
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.table([off, on], "two phases"))
    text = console.export_text()
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert "62.5%" in lines["from dram"]
    assert "from ssd" not in lines
    assert "30" in lines["tokens computed"]
    assert "3 of 3" in lines["same answers"]


def test_percentile_of_few_values():
    assert report.percentile_95([3.0]) == 3.0
    assert report.percentile_95([float(value) for value in range(101)]) == pytest.approx(95.0)


def test_a_server_that_cannot_start_shows_its_last_words(tmp_path):
    async def start() -> None:
        async with running_server(["no.such.setting=1"], tmp_path / "log"):
            pytest.fail("it must not start")

    with pytest.raises(EngineError, match=r"(?s)ended with \d+ before it answered.*no"):
        asyncio.run(start())
