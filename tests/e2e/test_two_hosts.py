"""Hosts with addresses of their own that share one pool, set up as the guide says: one computes, all reuse.

A host dies, the master dies and comes back, a host joins: answers stay what they are.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from workmem.testing.network import Host, Network, network
from workmem.testing.process import MODEL_NAME, sources, text
from workmem.testing.tiny_models import build_model
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "cluster.md").read_text(encoding="utf-8")
SEVERAL = re.findall(r"^\$ (workmem cluster up .*)$", GUIDE.split("\n## On several\n")[1], re.MULTILINE)
START_S = 60.0
HEARD_S = 3.0
PORT = 8000


def prompts(name: str, count: int = 3) -> list[str]:
    """Texts that share nothing, of some 300 tokens each."""
    return [f"{number}. {name} has read the whole book of rules. " * 7 for number in range(count)]


class Member:
    """A host of the pool: `workmem cluster up`, and a server with a store of its own, as `up` says to set it."""

    def __init__(self, host: Host, model: Path) -> None:
        self.host = host
        self.url = f"http://{host.address}:{PORT}"
        self._model = model
        self._said, self._printed = host.folder / "said", host.folder / "workmem.toml"

    def up(self, command: str) -> None:
        """A command of the guide, with the memory that a test has."""
        command = command.replace("64GiB", "64MiB")
        program, *words = shlex.split(command)
        assert program == "workmem"
        self._printed.unlink(missing_ok=True)
        self._start(words, out=self._printed, sign="Ctrl-C stops")

    def serve(self) -> None:
        settings = {
            "server.host": self.host.address,
            "server.port": PORT,
            "engine.model": self._model,
            "engine.served_name": MODEL_NAME,
            "engine.dtype": "fp32",
            "engine.deterministic": "true",
            "engine.vram_bytes": "16MiB",
            "engine.threads": 1,
            "store.dram.bytes": "32MiB",
            "store.ssd.enabled": "false",
            "store.ssd.retry_s": 1,
        }
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        self._start(["serve", *words], out=self._said, sign="listening on ")

    def part(self, name: str) -> int:
        """Process id of the last part that `up` named so."""
        return int(re.findall(rf"^  {name} .*process (\d+)", self.said, re.MULTILINE)[-1])

    @property
    def said(self) -> str:
        return self._said.read_text(encoding="utf-8")

    def hear(self, words: str, times: int = 1) -> None:
        wait_until(lambda: self.said.count(words) >= times, timeout_s=START_S)

    def ask(self, prompt: str) -> dict:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return self.host.ask(f"{self.url}/v1/completions", body)

    def gauge(self, name: str) -> float:
        page = self.host.fetch(f"{self.url}/metrics")
        return float(re.search(rf"^workmem_{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)[1])

    def offer(self, prompts: list[str]) -> dict[str, str]:
        """Compute them; come back when all of it lies in the pool, and others have had time to hear of it."""
        saved = self.gauge("store_saves_total")
        answers = {prompt: text(self.ask(prompt)) for prompt in prompts}
        wait_until(
            lambda: (
                self.gauge("store_saves_total") >= saved + 17 * len(prompts)
                and not self.gauge("store_unwritten_pages")
            ),
            timeout_s=90,
            step_s=0.3,
        )
        # Others look four times a second.
        time.sleep(HEARD_S)
        return answers

    def finds(self, answers: dict[str, str]) -> None:
        """Each prompt comes out of the pool, and its answer is the same."""
        for prompt, wanted in answers.items():
            answer = self.ask(prompt)
            assert text(answer) == wanted
            assert sources(answer).get("remote", 0) > 200, sources(answer)

    def _start(self, words: list[str], *, out: Path, sign: str) -> None:
        before = self.said.count(sign) if self._said.exists() else 0
        process = self.host.start([sys.executable, "-m", "workmem", *words], out=out, err=self._said)
        wait_until(lambda: self.said.count(sign) > before or process.poll() is not None, timeout_s=START_S)
        assert process.poll() is None, self.said


@pytest.fixture
def net(tmp_path):
    with network(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


def test_what_one_host_computed_is_a_hit_on_the_other_also_after_the_master_died(net: Network, model: Path):
    first, second, *_ = SEVERAL
    one, two = Member(net.host("10.0.0.1"), model), Member(net.host("10.0.0.2"), model)
    one.up(first)
    two.up(second)
    one.serve()
    two.serve()
    before = one.offer(prompts("Ada"))
    two.finds(before)

    os.kill(one.part("master"), signal.SIGKILL)
    # Nobody waits for a master: own memory answers, and what is not there is computed.
    assert {prompt: text(two.ask(prompt)) for prompt in before} == before
    one.hear("the master ended; it is started again")
    for member in (one, two):
        wait_until(lambda member=member: not member.gauge("store_below_away"), timeout_s=60, step_s=0.3)
    after = two.offer(prompts("Grace"))
    one.finds(after)


def test_a_host_dies_and_another_joins(net: Network, model: Path):
    first, second, *_ = SEVERAL
    master = Member(net.host("10.0.0.1"), model)
    # As the guide says of a master and nothing else.
    master.up(first.replace("segment_bytes=64GiB", "segment_bytes=0"))
    dies, stays = (Member(net.host(f"10.0.0.{number}"), model) for number in (2, 3))
    for member in (dies, stays):
        member.up(second.replace("=10.0.0.2 ", f"={member.host.address} "))
        member.serve()
    shared = dies.offer(prompts("Ada", 6))
    stays.finds(dict(list(shared.items())[:3]))

    dies.host.die()
    # What lay there is gone, and is computed; nobody hangs on a host that says nothing.
    assert {prompt: text(stays.ask(prompt)) for prompt in shared} == shared

    joins = Member(net.host("10.0.0.4"), model)
    joins.up(second.replace("=10.0.0.2 ", "=10.0.0.4 "))
    joins.serve()
    # Until the master strikes the dead host off nothing is put: what is computed then is its own host's alone.
    until = time.monotonic() + 120
    for number in itertools.count():
        fresh = stays.offer(prompts(f"Grace {number}", 1))
        answers = [joins.ask(prompt) for prompt in fresh]
        assert [text(answer) for answer in answers] == [*fresh.values()]
        if sources(answers[0]).get("remote", 0) > 200:
            break
        assert time.monotonic() < until
    assert stays.gauge("store_below_error") == 0
    assert {prompt: text(joins.ask(prompt)) for prompt in shared} == shared
