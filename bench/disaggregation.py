r"""Long prompts beside running streams on two vLLM servers: each takes both, or one computes prompts for the other.

    python bench/disaggregation.py --quick --model MODEL --vllm-python VENV/bin/python

Two vLLM servers with a core each, one store, one gateway in front. The same servers serve both arms in turns, for their
roles change at run time: `both, both`, where the gateway sends a request to the one that is less busy, and `prefill,
decode`, where it splits prompts of 512 tokens and more. In each window some clients stream answers without a pause, and one
client sends a long prompt after another. What is told: the time between a stream's tokens (median, p99, largest), tokens
streamed a second, and the time to first token of the long prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import aiohttp
from harness import (
    RESULTS,
    Budget,
    Journal,
    Texts,
    end_on_sigterm,
    end_run,
    environment,
    folder_of_run,
    in_turns,
    mode_of,
    parser_of,
    write_result,
)
from rich.console import Console
from rich.table import Table
from vllm_systems import SOURCE, add_dtype, free_port, new_tag

from workmem.testing.waiting import wait_until

ARMS = {"both": ("both", "both"), "disaggregated": ("prefill", "decode")}
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 4, 96, 96
LONG_PROMPT, LONG_TOKENS, LONG_PAUSE_S = 1536, 4, 2.0
SPLIT_MIN_TOKENS = 512
BLOCK_TOKENS, BLOCKS = 32, 256
START_S, SETTLE_S = 240.0, 3.0


class Mode(NamedTuple):
    """What fits into which time."""

    name: str
    windows: int
    """Of each arm."""
    window_s: float
    budget_s: float


QUICK = Mode("quick", 4, 40.0, 560.0)
FULL = Mode("full", 16, 90.0, 3400.0)
SMOKE = Mode("smoke", 1, 10.0, 3000.0)


class Fleet:
    """The store, two servers and the gateway: processes that end with this one's `end`."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._folder = folder
        self._sockets = Path(tempfile.gettempdir()) / new_tag()
        self._sockets.mkdir(mode=0o700)
        self._running: list[subprocess.Popen[bytes]] = []
        socket = self._sockets / "s.sock"
        source = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._start(
            "store",
            [sys.executable, "-m", "workmem", "store", "serve"],
            {"store.host.socket": socket, "store.dram.bytes": "2GiB", "store.ssd.enabled": "false"},
            {"PYTHONPATH": source},
        )
        wait_until(socket.exists, START_S)
        cores = sorted(os.sched_getaffinity(0))
        self.urls: list[str] = []
        for number in range(2):
            port = free_port()
            self.urls.append(f"http://127.0.0.1:{port}")
            self._vllm(arguments, number, port, socket, cores[number % len(cores)], source)
        port = free_port()
        self.gateway = f"http://127.0.0.1:{port}"
        self._start(
            "gateway",
            [sys.executable, "-m", "workmem", "serve"],
            {
                "server.port": port,
                "upstream.urls": ",".join(self.urls),
                "upstream.split": "always",
                "upstream.split_min_tokens": SPLIT_MIN_TOKENS,
            },
            {"PYTHONPATH": source},
        )

    def _vllm(
        self, arguments: argparse.Namespace, number: int, port: int, socket: Path, core: int, source: str
    ) -> None:
        connector = {
            "kv_connector": "WorkmemConnector",
            "kv_connector_module_path": "workmem.plugins.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store.host.socket": str(socket), "vllm.start_store": "false"},
        }
        command = [
            str(arguments.vllm_python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            *("--model", str(arguments.model), "--served-model-name", "model", "--dtype", arguments.dtype),
            *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-num-seqs", "16"),
            *("--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS)),
            *("--num-gpu-blocks-override", str(BLOCKS), "--enable-prompt-tokens-details"),
            *("--prefix-caching-hash-algo", "sha256_cbor", "--kv-transfer-config", json.dumps(connector)),
        ]
        settings = {
            "PYTHONPATH": source,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._start(f"vllm-{number}", command, {}, settings)

    def _start(self, name: str, command: list[str], sets: dict[str, object], environ: dict[str, str]) -> None:
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running.append(
                subprocess.Popen(
                    [*command, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | environ,
                    start_new_session=True,
                )
            )

    async def wait(self, session: aiohttp.ClientSession) -> None:
        """Until all of them answer. Raises RuntimeError where one ended."""
        until = time.monotonic() + START_S
        for url in [*self.urls, self.gateway]:
            while True:
                if any(process.poll() is not None for process in self._running):
                    raise RuntimeError(f"a server ended as it started; see the logs in {self._folder}")
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/health") as answer:
                        if answer.status == 200:
                            break
                if time.monotonic() > until:
                    raise RuntimeError(f"{url} did not answer within {START_S:g} s")
                await asyncio.sleep(0.3)

    async def take_roles(self, session: aiohttp.ClientSession, roles: Sequence[str]) -> None:
        """Have the gateway give each server its role."""
        # Who decodes comes first: a gateway keeps one that does.
        for url, role in sorted(zip(self.urls, roles, strict=True), key=lambda pair: pair[1] == "prefill"):
            async with session.post(
                f"{self.gateway}/debug/servers", json={"url": url, "role": role}
            ) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"role {role} was refused: {await answer.text()}")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            async with session.get(f"{self.gateway}/debug/servers") as answer:
                found = {one["url"]: one["role"] for one in (await answer.json())["data"]}
            if [found[url] for url in self.urls] == list(roles):
                return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"roles did not become {roles} in 60 s")

    def end(self) -> None:
        """End all, whatever state they are in."""
        for process in reversed(self._running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + 20
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)


class Window:
    """Some seconds of load, and what came of it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, texts: Texts, seconds: float) -> None:
        self._session = session
        self._url = url
        self._texts = texts
        self._seconds = seconds
        self._until = 0.0
        self.gaps: list[float] = []
        self.long_ttft: list[float] = []
        self.tokens = 0
        self.failed = 0

    async def run(self) -> None:
        """All clients, until the window is over; what is under way is finished."""
        self._until = time.monotonic() + self._seconds
        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(self._stream(number))
            group.create_task(self._prompts())

    async def _stream(self, number: int) -> None:
        # Not all of them begin at once.
        await asyncio.sleep(0.3 * number)
        while time.monotonic() < self._until:
            last = None
            async for at in self._tokens(STREAM_PROMPT, STREAM_TOKENS):
                if last is not None:
                    self.gaps.append(at - last)
                last = at
                self.tokens += 1

    async def _prompts(self) -> None:
        await asyncio.sleep(LONG_PAUSE_S)
        while time.monotonic() < self._until:
            begin = time.monotonic()
            is_first = True
            async for at in self._tokens(LONG_PROMPT, LONG_TOKENS):
                if is_first:
                    self.long_ttft.append(at - begin)
                    is_first = False
            await asyncio.sleep(LONG_PAUSE_S)

    async def _tokens(self, length: int, count: int) -> AsyncIterator[float]:
        """When each event with a token came."""
        body = {
            "model": "model",
            "prompt": self._texts.prompt(length),
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                self.failed += 1
                await asyncio.sleep(0.2)
                return
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.failed += 1
                    elif event.get("choices"):
                        yield time.monotonic()


async def measure(
    mode: Mode, arguments: argparse.Namespace, folder: Path, journal: Journal, console: Console
) -> list[str]:
    """All windows that the budget holds; what was left out."""
    left = [
        (number, arm)
        for number in range(mode.windows)
        for arm in in_turns(list(ARMS), number)
        if f"{number}|{arm}" not in journal.done
    ]
    if not left:
        return []
    budget = Budget(mode.budget_s)
    texts = Texts(arguments.model, arguments.workloads, arguments.seed)
    console.log("starting the store, two vLLM servers and the gateway")
    fleet = Fleet(arguments, folder)
    skipped: list[str] = []
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            await fleet.wait(session)
            for url in fleet.urls:
                # Pays for what happens once.
                await Window(session, url, texts, 2.0).run()
            for number, arm in left:
                if budget.left_s < 1.5 * mode.window_s + SETTLE_S:
                    skipped.append(f"no time for window {number + 1} of {arm} and later ones")
                    break
                console.log(f"window {number + 1}, {arm} ({budget.left_s:.0f} s left)")
                await fleet.take_roles(session, ARMS[arm])
                await asyncio.sleep(SETTLE_S)
                window = Window(session, fleet.gateway, texts, mode.window_s)
                begin = time.monotonic()
                await window.run()
                journal.record(
                    f"{number}|{arm}",
                    arm=arm,
                    window=number,
                    wall_s=time.monotonic() - begin,
                    tokens=window.tokens,
                    gaps_s=[round(gap, 5) for gap in window.gaps],
                    long_ttft_s=window.long_ttft,
                    failed=window.failed,
                )
    finally:
        fleet.end()
    return skipped


def summarise(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per arm over all of its windows."""
    rows: list[dict[str, Any]] = []
    for arm in ARMS:
        found = [entry for entry in entries.values() if entry["arm"] == arm]
        gaps = [gap for entry in found for gap in entry["gaps_s"]]
        long = [ttft for entry in found for ttft in entry["long_ttft_s"]]
        if len(gaps) < 2 or not long:
            continue
        rows.append(
            {
                "arm": arm,
                "windows": len(found),
                "itl_s": {"p50": median(gaps), "p99": quantiles(gaps, n=100)[-1], "max": max(gaps)},
                "itl_p99_by_window_s": [quantiles(entry["gaps_s"], n=100)[-1] for entry in found],
                "tokens_per_s": sum(entry["tokens"] for entry in found)
                / sum(entry["wall_s"] for entry in found),
                "long_prompts": len(long),
                "long_ttft_s": {"p50": median(long), "max": max(long)},
                "failed": sum(entry["failed"] for entry in found),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """For people."""
    shown = Table(
        "servers", "ITL p50 ms", "p99", "max", "tokens/s", "long prompts", "their TTFT p50 s", "failed"
    )
    for row in rows:
        itl = [f"{row['itl_s'][name] * 1e3:.0f}" for name in ("p50", "p99", "max")]
        counted = (f"{row['tokens_per_s']:.1f}", str(row["long_prompts"]), f"{row['long_ttft_s']['p50']:.2f}")
        shown.add_row(row["arm"], *itl, *counted, str(row["failed"]))
    return shown


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__ or "", "disaggregation", quick=QUICK, full=FULL, smoke=SMOKE)
    parser.add_argument(
        "--vllm-python", type=Path, required=True, help="Python of an environment with vLLM for CPU"
    )
    add_dtype(parser, environment()["cpu_flags"])
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    mode: Mode = mode_of(arguments)
    console = Console()
    out = arguments.out or RESULTS / f"disaggregation-{mode.name}.json"
    end_on_sigterm()
    machine = environment()
    config = {
        "mode": arguments.mode._asdict(),
        "seed": arguments.seed,
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "streams": [STREAMS, STREAM_PROMPT, STREAM_TOKENS],
        "long": [LONG_PROMPT, LONG_TOKENS, LONG_PAUSE_S],
        "split_min_tokens": SPLIT_MIN_TOKENS,
    }
    journal = Journal(out.with_suffix(".partial.jsonl"), config | {"commit": machine["commit"]})
    folder = folder_of_run(out, is_new=True)
    absent: dict[str, str] = {}
    try:
        skipped = asyncio.run(measure(mode, arguments, folder, journal, console))
    except (RuntimeError, OSError, TimeoutError, aiohttp.ClientError) as error:
        absent = {"run": f"ended: {error}"}
        skipped = [absent["run"]]
        console.log(absent["run"])
    rows = summarise(journal.done)
    body = {
        "bench": "disaggregation",
        "machine": machine | {"load_1m_end": os.getloadavg()[0]},
        "config": config,
        "systems": list(ARMS),
        "absent": absent,
        "rows": rows,
        "skipped": skipped,
        "raw": list(journal.done.values()),
    }
    write_result(out, body)
    console.print(table(rows))
    console.print(end_run(journal, out, folder, skipped))


if __name__ == "__main__":
    main()
