"""The fleet's prompts, and what its rounds come to."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import fleet
import fleet_load
import pytest
from fleet_load import Load, Size
from harness import Journal
from rich.console import Console
from systems import System, WorkerFailed

SIZE = Size(agents=3, rounds=4, first=80, last=260)
POOLS = {
    "system": list(range(1000, 1400)),
    "answer": list(range(2000, 2400)),
    "result": list(range(3000, 3400)),
}
HEADS = {"system": [1], "answer": [2], "result": [3], "message": [4]}


@pytest.fixture
def load() -> Load:
    return Load(SIZE, POOLS, HEADS, 7)


def test_a_full_run_has_a_million_prompt_tokens_of_ten_agents_in_twenty_rounds():
    size = fleet.FULL.size
    assert (size.agents, size.rounds) == (10, 20)
    assert 1_000_000 <= size.total < 1_001_000
    # What SmolLM2 takes.
    assert size.last + 2 * fleet.MAX_TOKENS <= 8192


def test_prompts_have_the_lengths_that_were_asked_for(load: Load):
    for number in range(SIZE.rounds):
        assert {len(prompt) for prompt in load.prompts(number)} == {SIZE.prompt_tokens(number)}
    assert SIZE.total == sum(len(p) for number in range(SIZE.rounds) for p in load.prompts(number))


def test_each_round_goes_on_from_the_one_before(load: Load):
    for number in range(1, SIZE.rounds):
        for before, after in zip(load.prompts(number - 1), load.prompts(number), strict=True):
            assert after[: len(before)] == before


def test_agents_share_the_beginning_and_nothing_behind_it(load: Load):
    first, second, third = load.prompts(0)
    assert first[:40] == second[:40] == third[:40]
    assert len({tuple(prompt[40:]) for prompt in (first, second, third)}) == 3


def test_a_message_is_what_the_other_agent_said_in_the_round_before(load: Load):
    added = SIZE.prompt_tokens(2) - SIZE.prompt_tokens(1)
    said = load.prompts(1)[1][SIZE.prompt_tokens(0) :][: int(added * fleet_load.ANSWER)]
    heard = load.prompts(2)[2][SIZE.prompt_tokens(1) :]
    assert said[0] == HEADS["answer"][0]
    at = heard.index(HEADS["message"][0])
    message = heard[at + 1 :]
    assert len(message) > 3
    assert message == said[1 : 1 + len(message)]


def test_the_same_seed_makes_the_same_load(load: Load):
    again, other = Load(SIZE, POOLS, HEADS, 7), Load(SIZE, POOLS, HEADS, 8)
    assert again.prompts(3) == load.prompts(3)
    assert other.prompts(3) != load.prompts(3)


def test_messages_are_found_whatever_surrounds_them(tmp_path: Path):
    turns = [{"role": "system", "content": "Rules."}, {"role": "assistant", "content": "I look."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"traj": turns}) + "\nnot json\n")
    deep = {"history": [{"info": {"role": "tool", "content": "42"}}, {"role": "user", "content": None}]}
    (tmp_path / "b.traj.gz").write_bytes(gzip.compress(json.dumps([deep, *turns]).encode()))
    (tmp_path / "c.bin").write_bytes(b"\0")
    found = list(fleet_load.messages_of(tmp_path))
    assert found == [("system", "Rules."), ("answer", "I look."), ("result", "42")]


def test_a_folder_without_all_kinds_is_refused(tmp_path: Path, smol_tokenizer: Path):
    (tmp_path / "a.json").write_text(json.dumps([{"role": "assistant", "content": "alone"}]))
    with pytest.raises(SystemExit, match="system, result"):
        fleet_load.load_of(SIZE, smol_tokenizer, tmp_path, 1)


@pytest.fixture
def smol_tokenizer(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_packaged_texts_make_a_load(smol_tokenizer: Path):
    load = fleet_load.load_of(SIZE, smol_tokenizer, None, 1)
    assert len(load.prompts(3)[0]) == SIZE.last


# -- a whole run


class Machine:
    def __init__(self) -> None:
        self.taken: list[tuple[str, int]] = []
        self.dies_at = 0
        self.refused = ""
        self.running: set[str] = set()


class ScriptedWorker:
    """Has a prompt's blocks if it took the round before in this process."""

    def __init__(self, machine: Machine, system: System, log: Path, start_timeout_s: float) -> None:
        if system.name == machine.refused:
            raise WorkerFailed("ended: no such module")
        machine.running.add(system.name)
        self._machine, self._name = machine, system.name
        self.versions = {"engine": "0"}

    def resume(self) -> None: ...

    def pause(self) -> None: ...

    def close(self) -> None:
        self._machine.running.discard(self._name)

    def ask(self, timeout_s: float, **request):
        if request["do"] != "fleet" or request["prompts"] == [fleet.WARM_UP]:
            return {"saved_s": 0.0}
        self._machine.taken.append((self._name, len(request["prompts"][0])))
        if len(self._machine.taken) == self._machine.dies_at:
            raise KeyboardInterrupt
        cached = 64 if "workmem" in self._name else 0
        answer = {"ttft_s": 1.0 if cached else 2.0, "token_ids": [5], "cached": cached, "sources": None}
        return {"answers": [answer | {"sources": {"dram": cached}} for _ in request["prompts"]]}


ARMS = [
    fleet.Arm(name, lambda place, name=name: System(name, Path("p"), "x.py", {"threads": 1}))
    for name in ("vLLM", "vLLM with workmem")
]
MODE = fleet.Mode("test", SIZE, 100.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(fleet, "Worker", lambda *given: ScriptedWorker(found, *given))
    return found


def bench_in(folder: Path, load: Load, mode=MODE) -> tuple[fleet.Bench, Journal]:
    journal = Journal(folder / "run.partial.jsonl", {})
    return fleet.Bench(mode, ARMS, load, folder, journal, Console(quiet=True)), journal


def test_all_take_a_round_before_any_takes_the_next(tmp_path: Path, load: Load, machine: Machine):
    bench, journal = bench_in(tmp_path, load)
    bench.run()
    a, b = "vLLM", "vLLM with workmem"
    order = [name for name, _ in machine.taken]
    assert order == [a, b, b, a, a, b, b, a]
    assert not machine.running
    assert len(journal.done) == 8
    bench_in(tmp_path, load)[0].run()
    assert len(machine.taken) == 8, "nothing is measured twice"


def test_a_run_that_goes_on_sends_the_round_before_once_more(tmp_path: Path, load: Load, machine: Machine):
    machine.dies_at = 6
    with pytest.raises(KeyboardInterrupt):
        bench_in(tmp_path, load)[0].run()
    assert not machine.running
    del machine.taken[:]
    machine.dies_at = 0
    bench, journal = bench_in(tmp_path, load)
    bench.run()
    lengths = [SIZE.prompt_tokens(number) for number in (1, 1, 2, 3, 3)]
    assert [length for _, length in machine.taken] == lengths
    assert len(journal.done) == 8


def test_totals_compare_request_by_request(tmp_path: Path, load: Load, machine: Machine):
    bench, journal = bench_in(tmp_path, load)
    bench.run()
    rows = {row["arm"]: row for row in fleet.totals(journal.done)}
    ours = rows["vLLM with workmem"]
    assert ours["prompt_tokens"] == SIZE.total
    assert ours["computed"] == SIZE.total - 64 * SIZE.agents * SIZE.rounds
    assert ours["computed_of_without"] == pytest.approx(ours["computed"] / SIZE.total)
    assert ours["ttft_of_without_later"]["ratio"] == pytest.approx(0.5)
    assert ours["ttft_of_without_later"]["pairs"] == SIZE.agents * (SIZE.rounds - 1)
    assert (ours["same_answers"], ours["answers"]) == (12, 12)
    assert "computed_of_without" not in rows["vLLM"]


def test_totals_count_only_rounds_that_all_have_taken(tmp_path: Path, load: Load, machine: Machine):
    bench, journal = bench_in(tmp_path, load)
    bench.run()
    del journal.done["vLLM|3"]
    assert {row["rounds"] for row in fleet.totals(journal.done)} == {3}
    assert fleet.totals({}) == []


def test_one_that_cannot_start_is_absent_and_the_others_go_on(tmp_path: Path, load: Load, machine: Machine):
    machine.refused = "vLLM with workmem"
    bench, journal = bench_in(tmp_path, load)
    bench.run()
    assert bench.absent == {"vLLM with workmem": "did not start: ended: no such module"}
    assert len(journal.done) == 4


def test_without_time_rounds_are_left_out_and_it_is_said(tmp_path: Path, load: Load, machine: Machine):
    bench, _ = bench_in(tmp_path, load, MODE._replace(budget_s=-1.0))
    bench._slowest_s = 1.0
    bench.run()
    assert not machine.taken
    assert bench.skipped == ["no time left for round 1 and later ones"]


def test_percentiles_of_one_value():
    assert fleet.percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "min": 3.0, "max": 3.0}
