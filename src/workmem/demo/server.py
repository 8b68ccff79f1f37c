"""A `workmem serve` of our own: started on a free port of 127.0.0.1, and stopped so that it saves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import aiohttp

from workmem.core.errors import EngineError

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
LOG_TAIL_LINES = 20


@contextlib.asynccontextmanager
async def running_server(settings: Sequence[str], log: Path) -> AsyncGenerator[str]:
    """Serve with `settings` ("section.key=value") and yield the base URL; stop it at the end.

    Output goes to `log`. Raises EngineError, with the last lines of the log, where the server ends
    before it answers or does not answer in time.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "workmem", "serve"]
    for setting in ("server.host=127.0.0.1", f"server.port={port}", *settings):
        command += ["--set", setting]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        await _wait_until_healthy(process, url, log)
        yield url
    finally:
        await _stop(process)


async def _wait_until_healthy(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while asyncio.get_running_loop().time() < deadline:
            if process.returncode is not None:
                raise EngineError(
                    f"the server ended with {process.returncode} before it answered:\n{_tail(log)}"
                )
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=2)) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise EngineError(f"the server did not answer within {START_TIMEOUT_S:.0f} s:\n{_tail(log)}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the server the gentle way, so that what it computed reaches the ssd; insist if it hangs."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
