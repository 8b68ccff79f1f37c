"""The whole server as a process: what survives a restart, a kill, and a model that changed underneath."""

import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from workmem.testing.tiny_models import build_model

PROMPT = "A fleet of agents shares what it has read. " * 6
BLOCK_TOKENS = 16


class Place(NamedTuple):
    """A model's folder and a store's folder."""

    model: Path
    store: Path

    def command(self) -> list[str]:
        settings = {
            "server.port": 0,
            "engine.model": self.model,
            "engine.served_name": "tiny",
            "engine.dtype": "fp32",
            # Bit-identical over all tiers, so that answers can be compared at all.
            "engine.deterministic": "true",
            "engine.vram_bytes": "16MiB",
            "engine.threads": 1,
            "store.dram.bytes": "64MiB",
            "store.ssd.path": self.store,
            "store.ssd.bytes": "64MiB",
        }
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "workmem", "serve", *words]


@contextmanager
def serving(place: Place, how: signal.Signals = signal.SIGTERM) -> Iterator[str]:
    """Serve and yield the base URL; stopped by `how`, and held to end as that should."""
    with subprocess.Popen(place.command(), stderr=subprocess.PIPE, text=True) as server:
        try:
            said = []
            for line in server.stderr:
                said.append(line)
                if "listening on " in line:
                    break
            else:
                pytest.fail("".join(said))
            yield line.split("listening on ")[1].split("/v1")[0]
        finally:
            server.send_signal(how)
            rest = server.stderr.read()
            code = server.wait(30)
        assert code == (0 if how == signal.SIGTERM else -how), rest
        assert "Traceback" not in rest


def ask(url: str, prompt: str = PROMPT) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def sources(answer: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in answer["usage"]["workmem"]["tokens_by_source"].items() if count}


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


@pytest.fixture(scope="module")
def yesterday(tmp_path_factory) -> tuple[Place, dict[str, Any]]:
    """A server that answered once and was stopped, and its answer."""
    folder = tmp_path_factory.mktemp("yesterday")
    place = Place(build_model(folder / "model"), folder / "store")
    with serving(place) as url:
        answer = ask(url)
        assert set(sources(answer)) == {"computed"}
    return place, answer


@pytest.fixture
def today(yesterday, tmp_path) -> Place:
    """A copy of yesterday's folders."""
    return Place(*(Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in yesterday[0]))


def test_a_context_computed_yesterday_is_a_hit_today(yesterday, today):
    _, before = yesterday
    with serving(today) as url:
        again = ask(url)
        second = subprocess.run(today.command(), capture_output=True, text=True, check=False)
    prompt = before["usage"]["prompt_tokens"]
    assert sources(again)["ssd"] == (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == sources(again)["ssd"]
    assert text(again) == text(before)
    assert second.returncode == 2, "a second server on the same store must not start"
    assert second.stderr.splitlines()[-1].startswith("workmem: $.store.ssd.path: ")


def test_a_model_that_changed_underneath_is_never_a_hit(yesterday, today):
    _, before = yesterday
    build_model(today.model, seed=1)
    with serving(today) as url:
        changed = ask(url)
        assert set(sources(changed)) == {"computed"}
        assert sources(ask(url)).keys() == {"vram", "computed"}
    assert text(changed) != text(before)


def test_a_server_killed_in_the_middle_loses_time_and_no_answer(yesterday, today):
    _, before = yesterday
    shutil.rmtree(today.store)
    with serving(today, signal.SIGKILL) as url:
        for number in range(4):
            ask(url, f"{number} {PROMPT}")
        assert text(ask(url)) == text(before)
    with serving(today) as url:
        again = ask(url)
        assert text(again) == text(before)
        assert text(ask(url)) == text(before)
