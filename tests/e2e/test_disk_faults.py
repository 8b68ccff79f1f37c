"""A whole server whose disk fills up or rots: answers stay right, the store says what happened."""

import os
import resource
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from workmem.testing.process import Place, ask, serving, sources, text
from workmem.testing.tiny_models import build_model

PROMPTS = [f"Agent {number} has read the whole book of rules. " * 6 for number in range(6)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(build_model(tmp_path / "model"), tmp_path / "ssd")


def reading(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def until(fact: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + 10
    while not fact():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)


def test_a_full_disk_costs_the_ssd_tier_and_nothing_else(place: Place) -> None:
    with serving(place) as (url, pid):
        before = {prompt: text(ask(url, prompt)) for prompt in PROMPTS[:2]}
        largest = max(path.stat().st_size for path in place.store.rglob("*") if path.is_file())
        # No file may grow: the same errors a full disk gives, for this process alone.
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, largest))
        for prompt in PROMPTS:
            first = text(ask(url, prompt))
            again = ask(url, prompt)
            assert text(again) == first == before.get(prompt, first)
            assert sources(again)["computed"] <= 16, "vram and dram go on serving"
        # Saves run behind: without an error all of this could have been written in time.
        until(lambda: reading(url, "workmem_store_ssd_write_errors_total") > 0, "the disk never refused")
    with serving(place) as (url, _):
        for prompt, wanted in before.items():
            assert text(ask(url, prompt)) == wanted


def test_a_rotten_disk_is_noticed_and_recomputed(place: Place) -> None:
    with serving(place) as (url, _):
        before = {prompt: text(ask(url, prompt)) for prompt in PROMPTS}
    for path in place.store.rglob("*"):
        if path.is_file() and path.stat().st_size > 100_000:
            rot(path)
    with serving(place) as (url, _):
        for prompt, wanted in before.items():
            again = ask(url, prompt)
            assert text(again) == wanted
            assert "ssd" not in sources(again)
        # Each was found, read and refused: an intact disk would have hit.
        assert reading(url, "workmem_store_quarantines_total") >= len(PROMPTS)


def rot(path: Path) -> None:
    """Flip one bit in every 4 KiB of a file, as no disk says it does."""
    with path.open("r+b", buffering=0) as file:
        for offset in range(1000, os.fstat(file.fileno()).st_size, 4096):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 4]))
