"""A whole server whose disk fills up or rots: answers stay right, the store says what happened."""

import json
import os
import resource
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from workmem.testing.tiny_models import build_model

PROMPTS = [f"Agent {number} has read the whole book of rules. " * 6 for number in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def serving(model: Path, ssd: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    settings = {
        "server.port": 0,
        "engine.model": model,
        "engine.dtype": "fp32",
        "engine.deterministic": "true",
        "engine.vram_bytes": "16MiB",
        "engine.threads": 1,
        "store.dram.bytes": "64MiB",
        "store.ssd.path": ssd,
        "store.ssd.bytes": "64MiB",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "workmem", "serve", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        said: list[str] = []
        assert server.stderr is not None
        try:
            for line in server.stderr:
                said.append(line)
                if "listening on " in line:
                    break
            else:
                pytest.fail("".join(said))
            yield line.split("listening on ")[1].split("/v1")[0], server
        finally:
            server.send_signal(signal.SIGTERM)
            rest = server.stderr.read()
            assert server.wait(60) == 0, rest
        assert "Traceback" not in rest


def ask(url: str, prompt: str) -> tuple[str, dict[str, int]]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return answer["choices"][0]["text"], answer["usage"]["workmem"]["tokens_by_source"]


def reading(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_a_full_disk_costs_the_ssd_tier_and_nothing_else(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "ssd") as (url, server):
        before = {prompt: ask(url, prompt)[0] for prompt in PROMPTS[:2]}
        largest = max(path.stat().st_size for path in (tmp_path / "ssd").rglob("*") if path.is_file())
        # No file may grow: the same errors a full disk gives, for this process alone.
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (largest, largest))
        for prompt in PROMPTS:
            text, _ = ask(url, prompt)
            again, sources = ask(url, prompt)
            assert again == text == before.get(prompt, text)
            assert sources["computed"] <= 16, "vram and dram go on serving"
    with serving(model, tmp_path / "ssd") as (url, _):
        for prompt, text in before.items():
            assert ask(url, prompt)[0] == text


def test_a_rotten_disk_is_noticed_and_recomputed(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "ssd") as (url, _):
        before = {prompt: ask(url, prompt)[0] for prompt in PROMPTS}
    with serving(model, tmp_path / "ssd") as (url, _):
        assert ask(url, PROMPTS[0])[1]["ssd"] > 0, "the control: an intact disk hits"
    for path in (tmp_path / "ssd").rglob("*"):
        if path.is_file() and path.stat().st_size > 100_000:
            rot(path)
    with serving(model, tmp_path / "ssd") as (url, _):
        for prompt, text in before.items():
            again, sources = ask(url, prompt)
            assert again == text
            assert sources["ssd"] == 0
        assert reading(url, "workmem_store_quarantines_total") >= len(PROMPTS)


def rot(path: Path) -> None:
    """Flip one bit in every 4 KiB of a file, as no disk says it does."""
    with path.open("r+b", buffering=0) as file:
        for offset in range(1000, os.fstat(file.fileno()).st_size, 4096):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 4]))
