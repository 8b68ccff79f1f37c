"""`workmem serve` as a process of its own, small and bit-identical over all tiers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

MODEL_NAME = "tiny"


class Served(NamedTuple):
    """A running server: base URL, without `/v1`, and process id."""

    url: str
    pid: int


class Place(NamedTuple):
    """A model's folder and a store's folder."""

    model: Path
    store: Path

    def command(self, more: Mapping[str, object] | None = None) -> list[str]:
        """The command that serves them, with `more` settings."""
        settings = {
            "server.port": 0,
            "engine.model": self.model,
            "engine.served_name": MODEL_NAME,
            "engine.dtype": "fp32",
            # Bit-identical over all tiers, so that answers can be compared at all.
            "engine.deterministic": "true",
            "engine.vram_bytes": "16MiB",
            "engine.threads": 1,
            "store.dram.bytes": "64MiB",
            "store.ssd.path": self.store,
            "store.ssd.bytes": "64MiB",
            **(more or {}),
        }
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "workmem", "serve", *words]


@contextmanager
def serving(
    place: Place,
    how: signal.Signals = signal.SIGTERM,
    *,
    stop_s: float = 60.0,
    more: Mapping[str, object] | None = None,
) -> Generator[Served]:
    """Serve `place` with `more` settings; stopped by `how` at the end, and held to end as that should.

    Raises RuntimeError with what the server said where it does not start, ends with another exit code
    than it should, or shows a traceback while it stops.
    """
    command = place.command(more)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:  # noqa: S603  our own program
        assert server.stderr is not None
        try:
            said: list[str] = []
            for line in server.stderr:
                said.append(line)
                if "listening on " in line:
                    break
            else:
                raise RuntimeError("".join(said))
            yield Served(said[-1].split("listening on ")[1].split("/v1")[0], server.pid)
        finally:
            server.send_signal(how)
            rest = server.stderr.read()
            code = server.wait(stop_s)
        if code != (0 if how == signal.SIGTERM else -how) or "Traceback" in rest:
            raise RuntimeError(f"the server ended with {code}:\n{rest}")


def ask(url: str, prompt: str, *, max_tokens: int = 12) -> dict[str, Any]:
    """The greedy completion of `prompt`, `max_tokens` long."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(  # noqa: S310  a server of our own
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        return json.load(response)


def text(answer: dict[str, Any]) -> str:
    """What was generated."""
    return answer["choices"][0]["text"]


def sources(answer: dict[str, Any]) -> dict[str, int]:
    """Prompt tokens by source, without those that gave none."""
    return {name: count for name, count in answer["usage"]["workmem"]["tokens_by_source"].items() if count}
