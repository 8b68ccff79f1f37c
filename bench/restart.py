"""Time to first token of a context that is computed, or comes from vram, dram, or the ssd after a restart.

    python bench/restart.py --quick --model MODEL

Everything goes through `workmem serve` over HTTP. Each prompt is sent once cold, then as a vram hit,
then as a dram hit (vram emptied in between); after all prompts the server restarts over the same ssd
folder and each is sent once more, and again as a vram hit of that process, which stands beside the rest. Where the
tokens really came from is read from the answer's usage; a measurement that did not come from where it should is
kept apart, never counted.

A run that is ended early, or had too little time, goes on when the same command runs again: samples are kept
in a journal beside the result, and what was computed stays in the ssd folder until all is measured.

In the same run: how fast this machine copies and checksums memory, and how fast it reads the same disk
with O_DIRECT, in requests of a page. With bytes = tokens reused x bytes of KV per token, the reach is
    dram hit <= vram hit + 1.5 x bytes / copy-and-checksum rate
    ssd hit  <= vram hit + 1.3 x bytes / raw read rate
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from harness import (
    RESULTS,
    Budget,
    Journal,
    Texts,
    end_run,
    environment,
    folder_of_run,
    mode_of,
    parser_of,
    spread,
    write_result,
)
from rates import RawRates
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from workmem.core.layout import BLOCK_TOKENS, KVLayout
from workmem.core.outcomes import COMPUTED
from workmem.demo.server import running_server
from workmem.store.config import StoreConfig

MAX_TOKENS = 16
"""Room for output behind the longest prompt."""
QUOTED_RATIO = 136
"""Cold over warm that users quote for persistent KV."""
COPY_FACTOR, DISK_FACTOR = 1.5, 1.3
RESTART_S = 30.0
"""Set aside for each restart and its hits."""
SOURCES = ("cold", "vram", "dram", "ssd")
AGAIN = "vram after restart"
"""A vram hit right behind the ssd hit: what the fresh process takes for the same request. No bound counts it."""


class Mode(NamedTuple):
    """What fits into which time."""

    name: str
    prompt_tokens: tuple[int, ...]
    prompts: int
    """Different prompts of each length; each is computed once."""
    repeats: int
    """Times a vram and a dram hit are measured for each prompt."""
    restarts: int
    budget_s: float


QUICK = Mode("quick", (1024, 4096, 8192 - MAX_TOKENS), 2, 3, 2, 540.0)
FULL = Mode("full", (1024, 4096, 8192 - MAX_TOKENS), 5, 5, 3, 3300.0)
SMOKE = Mode("smoke", (128, 256), 2, 2, 1, 200.0)


class Sample(NamedTuple):
    """One request. `source` is where it should have come from, `tokens_by_source` where it did."""

    source: str
    prompt_tokens: int
    prompt: int
    repeat: int
    """Number of the repeat (of the restart, for ssd)."""
    ttft_s: float
    tokens_by_source: dict[str, int]

    @property
    def is_pure(self) -> bool:
        """All that can be reused came from `source` alone: full blocks short of the last token."""
        tier = "vram" if self.source == AGAIN else self.source
        wanted = 0 if self.source == "cold" else reusable(self.prompt_tokens)
        cached = {name: n for name, n in self.tokens_by_source.items() if name != COMPUTED and n}
        return sum(cached.values()) == wanted == cached.get(tier, 0)


class Client:
    """Sends token ids to a server and times the first token."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.model = ""

    async def connect(self, warm_up: list[int]) -> None:
        """Ask for the model's name and pay for what happens only once."""
        async with self._session.get(f"{self._url}/v1/models") as response:
            self.model = (await response.json())["data"][0]["id"]
        for _ in range(2):
            await self.ask(warm_up, reuse=False)

    async def ask(self, token_ids: list[int], *, reuse: bool = True) -> tuple[float, dict[str, int]]:
        """Seconds to the first token, and tokens by source."""
        body = {
            "model": self.model,
            "prompt": token_ids,
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "workmem": {"reuse": reuse},
        }
        payload = msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        first, usage = 0.0, {}
        start = time.perf_counter()
        async with self._session.post(
            f"{self._url}/v1/completions", data=payload, headers=headers
        ) as response:
            if response.status != 200:
                raise SystemExit(f"the server answered {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                first = first or time.perf_counter() - start
                usage = msgspec.json.decode(line[6:]).get("usage") or usage
        return first, usage["workmem"]["tokens_by_source"]

    async def drop_vram(self) -> None:
        """Empty vram, so that the next hit has to come from below."""
        async with self._session.post(f"{self._url}/debug/drop_vram") as response:
            if response.status != 200:
                raise SystemExit(f"/debug/drop_vram answered {response.status}: {await response.text()}")


class Bench:
    """One server for cold, vram and dram; restarts for ssd; raw rates while no server runs."""

    def __init__(
        self,
        mode: Mode,
        texts: Texts,
        settings: list[str],
        rates: RawRates,
        folder: Path,
        journal: Journal,
    ) -> None:
        self._mode = mode
        self._settings = [*settings, f"store.ssd.path={folder / 'ssd'}"]
        self._rates = rates
        self._log = folder / "server.log"
        self._journal = journal
        self._budget = Budget(mode.budget_s)
        lengths = [(n, k) for k in range(mode.prompts) for n in mode.prompt_tokens]
        self._prompts = {(n, k): texts.prompt(n) for n, k in lengths}
        self._warm_up = texts.prompt(64)
        self.skipped: list[str] = []

    @property
    def samples(self) -> list[Sample]:
        """All so far, those of earlier runs too."""
        return [
            Sample(*(entry[field] for field in Sample._fields))
            for entry in self._journal.done.values()
            if "ttft_s" in entry
        ]

    @property
    def start_s(self) -> list[float]:
        """Seconds that each start of the server took."""
        return [entry["start_s"] for entry in self._journal.done.values() if "start_s" in entry]

    async def run(self, say: Callable[[str], None]) -> None:
        """Measure everything that fits into the budget."""
        say("raw rates")
        self._rates.measure()
        measured = [key for key in self._prompts if self._is_warm_done(*key)]
        left = [key for key in self._prompts if key not in measured]
        if left:
            say("starting the server")
            async with self._serving() as client:
                measured += [key for key in left if await self._measure_warm(client, *key, say)]
        for number in range(self._mode.restarts):
            left = [
                key
                for key in measured
                if not (self._has("ssd", *key, number) and self._has(AGAIN, *key, number))
            ]
            if not left:
                continue
            self._rates.measure()
            say(f"restart {number + 1}")
            async with self._serving() as client:
                for n, k in left:
                    say(f"ssd hit of {n} tokens, prompt {k + 1}, restart {number + 1}")
                    await self._sample(client, "ssd", n, k, number)
                    await self._sample(client, AGAIN, n, k, number)

    def _has(self, source: str, n: int, k: int, number: int) -> bool:
        return _unit(source, n, k, number) in self._journal.done

    def _is_warm_done(self, n: int, k: int) -> bool:
        hits = [(source, number) for source in ("dram", "vram") for number in range(self._mode.repeats)]
        return all(self._has(source, n, k, number) for source, number in [("cold", 0), *hits])

    async def _measure_warm(self, client: Client, n: int, k: int, say: Callable[[str], None]) -> bool:
        """Cold, dram and vram for one prompt; False where no time is left for it."""
        cold = [sample.ttft_s / sample.prompt_tokens for sample in self.samples if sample.source == "cold"]
        forecast_s = 1.3 * n * max(cold, default=0.0)
        # The restarts come last and must not be what is missing.
        if forecast_s > self._budget.left_s - RESTART_S * self._mode.restarts:
            self.skipped.append(
                f"prompt {k + 1} of {n} tokens: needs about {forecast_s:.0f} s, too little left"
            )
            return False
        say(f"cold, {n} tokens, prompt {k + 1}")
        if not self._has("cold", n, k, 0):
            await self._sample(client, "cold", n, k, 0)
        await self._until_saved(client, n, k)
        for number in range(self._mode.repeats):
            if self._has("dram", n, k, number) and self._has("vram", n, k, number):
                continue
            say(f"dram and vram hits of {n} tokens, prompt {k + 1}, {number + 1} of {self._mode.repeats}")
            await client.drop_vram()
            # Both, even if only one is missing: a vram hit is what the dram hit before it left.
            await self._sample(client, "dram", n, k, number)
            await self._sample(client, "vram", n, k, number)
        return True

    async def _until_saved(self, client: Client, n: int, k: int) -> None:
        """Saving runs behind the answers: wait until a hit comes from dram whole."""
        for _ in range(50):
            await client.drop_vram()
            _, tokens_by_source = await client.ask(self._prompts[n, k])
            if tokens_by_source.get("dram", 0) == reusable(n):
                return
            await asyncio.sleep(0.1)

    async def _sample(self, client: Client, source: str, n: int, k: int, number: int) -> None:
        sample = Sample(source, n, k, number, *await client.ask(self._prompts[n, k]))
        self._journal.record(_unit(source, n, k, number), **sample._asdict())

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncGenerator[Client]:
        started = time.perf_counter()
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            running_server(self._settings, self._log) as url,
            aiohttp.ClientSession(timeout=timeout) as session,
        ):
            start_s = time.perf_counter() - started
            self._journal.record(f"start|{len(self.start_s)}", start_s=start_s)
            client = Client(session, url)
            await client.connect(self._warm_up)
            yield client


def _unit(source: str, n: int, k: int, number: int) -> str:
    """Key in the journal."""
    return f"{source}|{n}|{k}|{number}"


def reusable(prompt_tokens: int) -> int:
    """Tokens of full blocks short of the last token, which is always computed."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def layout_of(model: Path) -> KVLayout:
    """Layout of the model's pages in bf16."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    return KVLayout(
        dtype="bf16",
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
    )


def summarise(samples: list[Sample], rates: RawRates, layout: KVLayout) -> list[dict[str, Any]]:
    """One row per prompt length: times by source, the reach, and what is above or below it."""
    rows = []
    for n in sorted({sample.prompt_tokens for sample in samples}):
        times = {
            source: spread(values)
            for source in (*SOURCES, AGAIN)
            if (
                values := [
                    s.ttft_s for s in samples if s.prompt_tokens == n and s.source == source and s.is_pure
                ]
            )
        }
        row: dict[str, Any] = {
            "prompt_tokens": n,
            "bytes": reusable(n) * layout.token_bytes,
            "ttft_s": times,
            "impure": [s._asdict() for s in samples if s.prompt_tokens == n and not s.is_pure],
        }
        row["reach"] = _reach(row["bytes"], times, rates)
        if "cold" in times:
            cold = times["cold"]["median"]
            row["cold_over"] = {
                source: cold / times[source]["median"] for source in times if source != "cold"
            }
        rows.append(row)
    return rows


def _reach(size: int, times: dict[str, dict[str, float | int]], rates: RawRates) -> dict[str, Any]:
    """Bound and measurement of the dram and ssd hit, where both are known."""
    bounds = {
        "dram": COPY_FACTOR * size / rates.copy_bytes_per_s,
        "ssd": DISK_FACTOR * size / rates.read_bytes_per_s if rates.read_bytes_per_s else None,
    }
    reach = {}
    for source, extra_s in bounds.items():
        if extra_s is not None and source in times and "vram" in times:
            bound_s = times["vram"]["median"] + extra_s
            measured_s = times[source]["median"]
            reach[source] = {"bound_s": bound_s, "measured_s": measured_s, "is_met": measured_s <= bound_s}
    return reach


def table(rows: list[dict[str, Any]]) -> Table:
    """For people, in milliseconds."""
    shown = Table(
        "prompt tokens", *SOURCES, "dram reach", "ssd reach", "cold / ssd", title="TTFT in ms, median"
    )
    for row in rows:
        times = [f"{row['ttft_s'][s]['median'] * 1e3:.1f}" if s in row["ttft_s"] else "-" for s in SOURCES]
        reaches = []
        for source in ("dram", "ssd"):
            reach = row["reach"].get(source)
            mark = {True: "met", False: "missed"}[reach["is_met"]] if reach else ""
            reaches.append(f"{reach['bound_s'] * 1e3:.1f} {mark}" if reach else "-")
        ratio = row.get("cold_over", {}).get("ssd")
        shown.add_row(str(row["prompt_tokens"]), *times, *reaches, f"{ratio:.0f}" if ratio else "-")
    shown.caption = f"users quote {QUOTED_RATIO} times for persistent KV"
    return shown


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, "restart", quick=QUICK, full=FULL, smoke=SMOKE)
    parser.add_argument(
        "--folder",
        type=Path,
        help="disk the ssd tier lives on during the run; default: the one for temporary files",
    )
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="more settings of the server"
    )
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    mode: Mode = mode_of(arguments)
    console = Console()
    out = arguments.out or RESULTS / f"restart-{mode.name}.json"
    layout = layout_of(arguments.model)
    machine = environment()
    settings = [f"engine.model={arguments.model}", "engine.dtype=bf16", *arguments.settings]
    config = {
        "mode": mode._asdict(),
        "seed": arguments.seed,
        "settings": ["engine.dtype=bf16", *arguments.settings],
    }
    config["model"] = arguments.model.name
    journal = Journal(out.with_suffix(".partial.jsonl"), config | {"commit": machine["commit"]})
    is_new = not any("ttft_s" in entry for entry in journal.done.values())
    folder = folder_of_run(out, arguments.folder, is_new=is_new)
    rates = RawRates(layout, folder, StoreConfig().ssd.readers)
    texts = Texts(arguments.model, arguments.workloads, arguments.seed)
    bench = Bench(mode, texts, settings, rates, folder, journal)
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("")
        asyncio.run(bench.run(lambda doing: progress.update(task, description=doing)))
    rows = summarise(bench.samples, rates, layout)
    body = {
        "bench": "restart",
        "machine": machine | {"load_1m_end": os.getloadavg()[0]},
        "config": config,
        "quoted_ratio": QUOTED_RATIO,
        "rates_bytes_per_s": rates.report(),
        "server_start_s": bench.start_s,
        "rows": rows,
        "skipped": bench.skipped,
        "raw": [sample._asdict() for sample in bench.samples],
    }
    write_result(out, body)
    console.print(table(rows))
    console.print(end_run(journal, out, folder, bench.skipped))


if __name__ == "__main__":
    main()
