"""The whole server as a process: what survives a restart, a kill, and a model that changed underneath."""

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from workmem.core.layout import BLOCK_TOKENS
from workmem.testing.process import Place, ask, serving, sources, text
from workmem.testing.tiny_models import build_model

PROMPT = "A fleet of agents shares what it has read. " * 6


@pytest.fixture(scope="module")
def yesterday(tmp_path_factory) -> tuple[Place, dict[str, Any]]:
    """A server that answered once and was stopped, and its answer."""
    folder = tmp_path_factory.mktemp("yesterday")
    place = Place(build_model(folder / "model"), folder / "store")
    with serving(place) as (url, _):
        answer = ask(url, PROMPT)
        assert set(sources(answer)) == {"computed"}
    return place, answer


@pytest.fixture
def today(yesterday, tmp_path) -> Place:
    """A copy of yesterday's folders."""
    return Place(*(Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in yesterday[0]))


def test_a_context_computed_yesterday_is_a_hit_today(yesterday, today):
    _, before = yesterday
    with serving(today) as (url, _):
        again = ask(url, PROMPT)
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
    with serving(today) as (url, _):
        changed = ask(url, PROMPT)
        assert set(sources(changed)) == {"computed"}
        assert sources(ask(url, PROMPT)).keys() == {"vram", "computed"}
    assert text(changed) != text(before)


def test_a_server_killed_in_the_middle_loses_time_and_no_answer(yesterday, today):
    _, before = yesterday
    shutil.rmtree(today.store)
    with serving(today, signal.SIGKILL) as (url, _):
        for number in range(4):
            ask(url, f"{number} {PROMPT}")
        assert text(ask(url, PROMPT)) == text(before)
    with serving(today) as (url, _):
        again = ask(url, PROMPT)
        assert text(again) == text(before)
        assert text(ask(url, PROMPT)) == text(before)
