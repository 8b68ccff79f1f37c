"""What a gateway adds: requests to a server that answers at once, sent to it directly, and through gateways."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from harness import in_turns
from prompt_traps import body_of, keys_shuffled
from vllm_systems import free_port

from workmem.demo.server import running_server

BODY_BYTES = 75_000
DIRECT, ON, OFF = "direct", "canonical on", "canonical off"
SHUFFLED = "canonical on, keys shuffled"
OURS = "workmem"
AIM_P50_MS, AIM_P95_MS = 2.0, 5.0
START_S = 60.0
_MOCK = Path(__file__).parent / "workers" / "mock_upstream.py"


class Load(NamedTuple):
    """How much is sent."""

    pairs: int
    streams: int
    stream_chunks: int
    stream_gap_s: float
    rate_s: float
    """Seconds of each measurement of requests a second."""
    rate_rounds: int
    clients: int


class Router(NamedTuple):
    """Somebody else's gateway."""

    name: str
    python: Path
    arguments: tuple[str, ...]

    def command(self, port: int, upstream: str) -> list[str]:
        """To start it."""
        known = {"PORT": str(port), "METRICS": str(free_port()), "UPSTREAM": upstream}
        program, *rest = self.arguments
        return [str(self.python.parent / program), *(known.get(word, word) for word in rest)]


def routers(vllm_router: Path | None, sglang_router: Path | None, smg: Path | None) -> list[Router]:
    """Those whose Python is given."""
    plain = ("--host", "127.0.0.1", "--port", "PORT", "--prometheus-port", "METRICS")
    plain += ("--worker-urls", "UPSTREAM", "--policy", "cache_aware")
    found = [
        ("vllm-router", vllm_router, ("vllm-router", *plain)),
        ("sglang-router", sglang_router, ("sglang-router", "launch", *plain)),
        ("smg", smg, ("smg", "launch", *plain)),
    ]
    return [Router(name, python, arguments) for name, python, arguments in found if python is not None]


def body_of_size(seed: int, size: int = BODY_BYTES) -> dict[str, Any]:
    """A chat of about `size` bytes, of which tools are nearly half; results of calls are pages of text, as agents read."""
    body = body_of(seed, tools=28)
    question, call, result = body["messages"][1:4]
    page = body["messages"][0]["content"][:3000]
    while len(json.dumps(body)) < size:
        body["messages"] += [question, call, result | {"content": page}]
    return body


class Wire:
    """A connection that is kept: HTTP by hand, so that the client's own time is small."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes, *, headers: str = "") -> tuple[float, bytes]:
        """Seconds to the first byte behind the head, and the whole answer's body. Raises OSError where it is not whole."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        reader, writer = self._streams
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"{headers}content-length: {len(body)}\r\n\r\n"
        )
        start = time.perf_counter()
        writer.write(head.encode() + body)
        try:
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status = answer.split(" ", 2)[1]
            first_s, data = await self._read(reader, answer, start)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the answer ends too early") from error
        if "connection: close" in answer:
            self.close()
        if status != "200":
            raise ConnectionError(f"status {status}: {data[:200]!r}")
        return first_s, data

    async def _read(self, reader: asyncio.StreamReader, head: str, start: float) -> tuple[float, bytes]:
        if "transfer-encoding: chunked" not in head:
            length = int(head.split("content-length:")[1].split("\r\n", maxsplit=1)[0])
            data = await reader.readexactly(length)
            return time.perf_counter() - start, data
        first_s = 0.0
        parts: list[bytes] = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            first_s = first_s or time.perf_counter() - start
            await reader.readexactly(2)
        await reader.readline()
        return first_s, b"".join(parts)

    def close(self) -> None:
        """Let go of the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@asynccontextmanager
async def mock() -> AsyncGenerator[int]:
    """A server that answers at once; its port."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, str(_MOCK), str(port))
    try:
        await listens(port, process)
        yield port
    finally:
        await end_of(process)


@asynccontextmanager
async def gateway(upstream: int, log: Path, *, canonical: str) -> AsyncGenerator[int]:
    """Our own; its port."""
    settings = [
        f"upstream.urls=http://127.0.0.1:{upstream}",
        f"prompt.canonical={canonical}",
        "server.connections_max=4096",
    ]
    async with running_server(settings, log) as url:
        yield int(url.rsplit(":", 1)[1])


@asynccontextmanager
async def router(which: Router, upstream: int, log: Path) -> AsyncGenerator[int]:
    """Somebody else's. Raises OSError where it does not start."""
    port = free_port()
    command = which.command(port, f"http://127.0.0.1:{upstream}")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=subprocess.STDOUT)
    try:
        await listens(port, process)
        yield port
    finally:
        await end_of(process)


async def listens(port: int, process: asyncio.subprocess.Process, within_s: float = START_S) -> None:
    """Wait until it takes connections. Raises OSError where it does not."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if process.returncode is not None:
            raise OSError(f"it ended with {process.returncode} before it listened")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return
    raise OSError(f"it did not listen within {within_s:.0f} s")


async def end_of(process: asyncio.subprocess.Process) -> None:
    """End it, the gentle way first."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


async def added_latency(load: Load, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Milliseconds to the first piece of a stream, by arm, request by request: each pair has one request for all arms."""
    chance = random.Random(seed)
    base = body_of_size(seed) | {"stream": True}
    async with AsyncExitStack() as running:
        upstream = await running.enter_async_context(mock())
        on = await running.enter_async_context(gateway(upstream, folder / "on.log", canonical="lossless"))
        off = await running.enter_async_context(gateway(upstream, folder / "off.log", canonical="off"))
        wires = {DIRECT: Wire(upstream), OFF: Wire(off), ON: Wire(on), SHUFFLED: Wire(on)}
        pairs: list[dict[str, Any]] = []
        for number in range(-10, load.pairs):
            base["messages"][-1] = {"role": "user", "content": f"Question {number} of {load.pairs}."}
            plain, mixed = (json.dumps(body).encode() for body in (base, keys_shuffled(base, chance)))
            pair: dict[str, Any] = {"pair": number, "bytes": len(plain), "ms": {}}
            for arm in in_turns(list(wires), number):
                first_s, _ = await wires[arm].post(mixed if arm == SHUFFLED else plain)
                pair["ms"][arm] = 1000 * first_s
            if number >= 0:
                pairs.append(pair)
        for wire in wires.values():
            wire.close()
    return pairs


def summed_latency(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each arm its time, and what it adds to that of the same request sent directly."""
    found: dict[str, Any] = {}
    for arm in (DIRECT, OFF, ON, SHUFFLED):
        times = sorted(pair["ms"][arm] for pair in pairs)
        added = sorted(pair["ms"][arm] - pair["ms"][DIRECT] for pair in pairs)
        found[arm] = {"ms": _percentiles(times)}
        if arm != DIRECT:
            said = _percentiles(added)
            found[arm] |= {
                "added_ms": said,
                "meets_aim": said["p50"] <= AIM_P50_MS and said["p95"] <= AIM_P95_MS,
            }
    return found


def _percentiles(ordered: Sequence[float]) -> dict[str, float]:
    return {
        "p50": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "min": ordered[0],
        "max": ordered[-1],
        "n": len(ordered),
    }


async def many_streams(load: Load, seed: int, folder: Path) -> dict[str, Any]:
    """So many streams at once: how many end whole, and how late."""
    body = json.dumps(body_of(seed, tools=2) | {"stream": True}).encode()
    headers = f"x-chunks: {load.stream_chunks}\r\nx-gap-s: {load.stream_gap_s}\r\n"
    found: dict[str, Any] = {"streams": load.streams, "body_bytes": len(body)}
    async with mock() as upstream, gateway(upstream, folder / "streams.log", canonical="lossless") as port:
        for name, at in ((DIRECT, upstream), (OURS, port)):
            start = time.perf_counter()
            ends = await asyncio.gather(*(_stream(at, body, headers, load) for _ in range(load.streams)))
            errors = sorted({end for end in ends if isinstance(end, str)})
            firsts = sorted(end for end in ends if isinstance(end, float))
            found[name] = {"whole": len(firsts), "wall_s": time.perf_counter() - start, "errors": errors[:5]}
            if firsts:
                found[name]["first_s"] = _percentiles(firsts)
    return found


async def _stream(port: int, body: bytes, headers: str, load: Load) -> float | str:
    wire = Wire(port)
    try:
        first_s, data = await wire.post(body, headers=headers)
    except OSError as error:
        return f"{type(error).__name__}: {error}"[:200]
    finally:
        wire.close()
    pieces = data.count(b'"content"')
    if not data.endswith(b"data: [DONE]\n\n") or pieces != load.stream_chunks:
        return f"not whole: {pieces} of {load.stream_chunks} pieces"
    return first_s


async def rates(
    load: Load, seed: int, folder: Path, others: Sequence[Router]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Requests a second, answered whole, of each gateway before the same mock; and who is absent, and why."""
    absent: dict[str, dict[str, Any]] = {}
    bodies = {
        "2 tools": json.dumps(body_of(seed, tools=2)).encode(),
        "75 kB": json.dumps(body_of_size(seed)).encode(),
    }
    rows: list[dict[str, Any]] = []
    async with AsyncExitStack() as running:
        upstream = await running.enter_async_context(mock())
        ports = {DIRECT: upstream}
        ports[OURS] = await running.enter_async_context(
            gateway(upstream, folder / "rate.log", canonical="lossless")
        )
        for one in others:
            log = folder / f"{one.name}.log"
            try:
                ports[one.name] = await running.enter_async_context(router(one, upstream, log))
                await _warm(ports[one.name], bodies["2 tools"])
            except OSError as error:
                ports.pop(one.name, None)
                tail = log.read_text(errors="replace")[-300:] if log.exists() else ""
                command = " ".join(one.command(0, "UPSTREAM"))
                absent[one.name] = {"command": command, "error": f"{error} {tail}".strip()}
        for number in range(load.rate_rounds):
            for name in in_turns(list(ports), number):
                for size, body in bodies.items():
                    row = await _rate(ports[name], body, load)
                    rows.append({"gateway": name, "body": size, "bytes": len(body), "round": number, **row})
    return rows, absent


async def _warm(port: int, body: bytes) -> None:
    """Wait until it knows its server."""
    end = time.monotonic() + START_S
    while True:
        try:
            await Wire(port).post(body)
        except OSError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.5)
        else:
            return


async def _rate(port: int, body: bytes, load: Load) -> dict[str, Any]:
    end = time.perf_counter() + load.rate_s
    done = failed = 0

    async def client() -> None:
        nonlocal done, failed
        wire = Wire(port)
        while time.perf_counter() < end:
            try:
                await wire.post(body)
            except OSError:
                failed += 1
                wire.close()
                await asyncio.sleep(0.01)
            else:
                done += 1
        wire.close()

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.clients)))
    return {"per_s": done / (time.perf_counter() - start), "failed": failed}


def summed_rates(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By gateway and size of body: requests a second, and ours over it, round by round."""
    found: list[dict[str, Any]] = []
    for size in dict.fromkeys(row["body"] for row in rows):
        ours = {row["round"]: row["per_s"] for row in rows if (row["body"], row["gateway"]) == (size, OURS)}
        for name in dict.fromkeys(row["gateway"] for row in rows):
            mine = [row for row in rows if (row["body"], row["gateway"]) == (size, name)]
            each = sorted(row["per_s"] for row in mine)
            ratio = [
                ours[row["round"]] / row["per_s"] for row in mine if row["per_s"] and row["round"] in ours
            ]
            found.append(
                {
                    "gateway": name,
                    "body": size,
                    "per_s": {
                        "median": statistics.median(each),
                        "min": each[0],
                        "max": each[-1],
                        "n": len(each),
                    },
                    "failed": sum(row["failed"] for row in mine),
                    "ours_of_it": statistics.median(ratio) if ratio else None,
                }
            )
    return found


def cores() -> int:
    """Cores that gateway, mock and client share."""
    return len(os.sched_getaffinity(0))
