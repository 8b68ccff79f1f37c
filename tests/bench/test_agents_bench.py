"""How sessions are played, what the runs come to, and that a run goes on where it was; engines are scripted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import agents
import agents_report
import pytest
import vllm_systems
from agents_load import Load, Size, Turn
from agents_report import PLAIN
from harness import Journal
from rich.console import Console
from systems import WORKERS, System, WorkerFailed
from vllm_systems import ALONE, LMCACHE, NATIVE, OURS, Kind, Place

from workmem.core.hints import Kind as Action
from workmem.prompt.hints import read_hints

SIZE = Size(sessions=4, requests=2, longest=1000, spread_s=5.0)
TEXTS = (
    {kind: list(range(50)) for kind in ("system", "answer", "result")},
    {key: [] for key in ("system", "answer", "result")},
)
SHAPES = [[Turn(0, 9600 + n, 32, 0.0, False), Turn(9600 + n, 11200, 32, 16.0, True)] for n in range(8)]


@pytest.fixture
def load() -> Load:
    return Load(SIZE, SHAPES, SHAPES, TEXTS, 7)


# -- sessions in time


class Engine:
    """One request at a time, 2 s each, first token after 1 s; time passes in steps and in sleep alone."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: list[str] = []
        self.begun: list[tuple[str, float]] = []
        self.tokens = 0

    def add(self, turn) -> str:
        self.begun.append((turn["name"], self.now))
        self.waiting.append(turn["name"])
        return turn["name"]

    def step(self):
        if not self.waiting:
            return []
        self.now += 1.0
        self.tokens += 1
        if self.tokens == 1:
            return [(self.waiting[0], 1, None)]
        self.tokens = 0
        return [(self.waiting.pop(0), 2, {"token_ids": [5, 6]})]

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def play():
    spec = importlib.util.spec_from_file_location("open_loop", WORKERS / "open_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.play


def test_a_turn_is_due_a_gap_after_the_answer_and_its_clock_starts_then(play):
    engine = Engine()
    sessions = [
        {"start_s": 0.0, "turns": [{"name": "a0", "gap_s": 0.0}, {"name": "a1", "gap_s": 10.0}]},
        {"start_s": 0.5, "turns": [{"name": "b0", "gap_s": 0.0}]},
    ]
    (first, second), (other,) = play(sessions, engine.add, engine.step, lambda: engine.now, engine.sleep)
    assert (first["due_s"], first["ttft_s"], first["end_s"]) == (0.0, 1.0, 2.0)
    # Due while the engine computed for another: that is part of its time.
    assert other["due_s"] == 0.5
    assert other["ttft_s"] == pytest.approx(2.5)
    assert second["due_s"] == 12.0
    assert second["ttft_s"] == pytest.approx(1.0, abs=0.01)
    assert second["token_ids"] == [5, 6]
    assert [name for name, _ in engine.begun] == ["a0", "b0", "a1"]


# -- what the runs come to


def run_of(arm: str, number: int, wall_s: float, later_s: float, cached: int) -> dict:
    requests = [
        {"turn": turn, "prompt_tokens": 100, "new": 100 if turn == 0 else 10, "cached": cached if turn else 0}
        | {"ttft_s": 1.0 if turn == 0 else later_s, "token_ids": [1, turn]}
        for turn in range(3)
    ]
    more = {"sources": {"dram": cached}, "hints": {"accepted": 3}, "counts": {"pins": 3}}
    return {"arm": arm, "repetition": number, "wall_s": wall_s, "requests": requests} | more


def rows_of(*runs: dict) -> dict[str, dict]:
    rows = agents_report.summarise({f"{run['arm']}|{run['repetition']}": run for run in runs})
    return {row["arm"]: row for row in rows}


def test_rows_count_what_was_computed_again():
    rows = rows_of(run_of(ALONE, 0, 30.0, 4.0, 0), run_of(OURS, 0, 10.0, 0.5, 90))
    assert (rows[ALONE]["computed"], rows[ALONE]["recomputed"]) == (300, 180)
    assert (rows[OURS]["computed"], rows[OURS]["recomputed"]) == (120, 0)
    assert rows[OURS]["input_tokens_per_s"]["median"] == pytest.approx(30.0)
    assert rows[OURS]["requests_per_s"]["median"] == pytest.approx(0.3)
    assert rows[OURS]["ttft_first_s"]["p95"] == 1.0
    assert rows[OURS]["ttft_later_s"]["p50"] == 0.5
    assert (rows[OURS]["same_answers"], rows[OURS]["answers"]) == (3, 3)
    assert rows[OURS]["hints"] == {"accepted": 3}


def test_only_repetitions_that_all_arms_have_are_compared():
    first, second = run_of(ALONE, 0, 30.0, 4.0, 0), run_of(ALONE, 1, 90.0, 9.0, 0)
    rows = rows_of(first, second, run_of(OURS, 0, 10.0, 0.5, 90))
    assert {row["repetitions"] for row in rows.values()} == {1}
    assert rows[ALONE]["wall_s"]["max"] == 30.0
    assert rows_of(second, run_of(OURS, 0, 10.0, 0.5, 90)) == {}
    assert agents_report.summarise({}) == []


def test_ours_is_held_to_vllm_alone_and_to_the_best_peer_of_each_measure():
    rows = agents_report.summarise(
        {
            run["arm"]: run
            for run in (
                run_of(ALONE, 0, 30.0, 4.0, 0),
                run_of(PLAIN, 0, 12.0, 1.0, 90),
                run_of(OURS, 0, 10.0, 0.5, 90),
                run_of(NATIVE, 0, 9.0, 2.0, 90),
                run_of(LMCACHE, 0, 20.0, 0.6, 90),
            )
        }
    )
    compared = agents_report.compare(rows)
    told = [(aim["of"], aim["against"], round(aim["ratio"], 2), aim["is_met"]) for aim in compared["aims"]]
    assert told == [
        ("throughput", ALONE, 3.0, True),
        ("p95 of later turns", ALONE, 8.0, True),
        ("throughput", NATIVE, 0.9, False),
        ("p95 of later turns", LMCACHE, 1.2, True),
    ]
    assert compared["holding"]["throughput"] == pytest.approx(2.5)
    assert compared["policy"]["throughput"] == pytest.approx(1.2)
    assert compared["policy"]["ttft_later_p95"] == pytest.approx(2.0)
    assert len(agents_report.table(rows, compared)[0].rows) == 5


def test_without_vllm_alone_nothing_is_compared_with_it():
    compared = agents_report.compare(list(rows_of(run_of(OURS, 0, 10.0, 0.5, 90)).values()))
    assert compared == {"against_alone": {}, "aims": []}


# -- arms


def test_arms_differ_in_their_connector_alone(tmp_path: Path, load: Load):
    arguments = agents.parsed(["--quick", "--model", "m", "--vllm-python", "v", "--workloads", "w"])
    arms = {kind.name: kind for kind in agents.arms_of(arguments)}
    assert list(arms) == [ALONE, OURS, PLAIN, NATIVE, LMCACHE, vllm_systems.MOONCAKE]
    shared = agents.shared_options(arguments, agents.QUICK, load)
    place = Place(tmp_path, tmp_path, "tag")
    with_us, plain = (arms[name].start(shared, place)["kv_transfer_config"] for name in (OURS, PLAIN))
    extra = with_us["kv_connector_extra_config"]
    assert extra.pop("vllm.retention") == "ttl"
    assert with_us == plain
    assert {
        name: "scheduler_cls" in kind.start(shared, place).get("llm", {})
        for name, kind in list(arms.items())[:4]
    } == {
        ALONE: False,
        OURS: True,
        PLAIN: False,
        NATIVE: False,
    }
    for name in (ALONE, OURS, PLAIN, NATIVE):
        options = arms[name].start(shared, place)
        assert {key: options[key] for key in ("blocks", "engine", "dtype", "cores")} == {
            key: shared[key] for key in ("blocks", "engine", "dtype", "cores")
        }
    assert (
        f"store.dram.bytes={agents.QUICK.dram_gib}GiB"
        in arms[PLAIN].start(shared, place)["servers"][0]["command"]
    )


def test_the_pool_is_a_quarter_of_what_sessions_hold_and_has_room_for_the_longest(load: Load):
    arguments = agents.parsed(["--quick", "--model", "m", "--vllm-python", "v"])
    shared = agents.shared_options(arguments, agents.QUICK, load)
    tokens = (shared["blocks"] - 1) * agents.BLOCK_TOKENS
    assert tokens >= shared["max_context"] >= load.longest
    assert (
        0
        <= tokens - max(load.working_set(agents.BLOCK_TOKENS) / 4, load.longest + 1)
        <= 2 * agents.BLOCK_TOKENS
    )


def test_the_connector_reads_what_a_gateway_sends(load: Load):
    hints = read_hints(None, agents.said("coding-1", 1, agents.pin_s(load)), None)
    assert (hints.session, hints.priority) == ("coding-1", agents.BACK_PRIORITY)
    assert read_hints(None, agents.said("coding-1", 0, 1.0), None).priority == 0
    assert [(action.kind, action.payload.ttl_s) for action in hints.actions] == [(Action.PIN, 2.0)]
    assert not hints.outcomes


# -- a whole run


class Machine:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.hinted: set[str] = set()
        self.running: set[str] = set()
        self.refused = ""
        self.dies_at = ("", 0)


class ScriptedWorker:
    def __init__(self, machine: Machine, system: System, log: Path, start_timeout_s: float) -> None:
        if system.name == machine.refused:
            raise WorkerFailed("ended: no such module")
        self._machine, self._name = machine, system.name
        assert not machine.running, "arms run one at a time"
        machine.running.add(system.name)
        self.versions = {"vllm": "0"}

    def close(self) -> None:
        self._machine.running.discard(self._name)

    def ask(self, timeout_s: float, **request):
        self._machine.asked.append((self._name, request["do"]))
        if request["do"] == "reset":
            return {"is_empty": True}
        if request["do"] != "play":
            return {}
        plays = [name for name, do in self._machine.asked if do == "play"]
        if (self._name, plays.count(self._name)) == self._machine.dies_at:
            raise KeyboardInterrupt
        if all(turn["params"] for session in request["sessions"] for turn in session["turns"]):
            self._machine.hinted.add(self._name)
        answer = {"due_s": 1.0, "ttft_s": 1.0, "end_s": 9.0, "cached": 0, "token_ids": [1]}
        answer |= {"sources": {"computed": 7}, "hints": [{"id": "tool", "outcome": "accepted"}]}
        found = [[dict(answer) for _ in session["turns"]] for session in request["sessions"]]
        return {"sessions": found, "counts": {}}


ARMS = [Kind(name, (), lambda shared, place: {"threads": 1}, Path("p")) for name in (ALONE, OURS, PLAIN)]
MODE = agents.SMOKE._replace(size=SIZE, repetitions=2, budget_s=100.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(agents, "Worker", lambda *given: ScriptedWorker(found, *given))
    return found


def bench_in(folder: Path, load: Load, mode=MODE) -> tuple[agents.Bench, Journal]:
    journal = Journal(folder / "run.partial.jsonl", {})
    return agents.Bench(mode, ARMS, {}, load, folder, journal, Console(quiet=True)), journal


def played(machine: Machine) -> list[str]:
    return [name for name, do in machine.asked if do == "play"]


def test_arms_take_turns_from_nothing_and_in_reverse_order_every_second_time(
    tmp_path: Path, load: Load, machine: Machine
):
    bench, journal = bench_in(tmp_path, load)
    bench.run()
    assert played(machine) == [ALONE, OURS, PLAIN, PLAIN, OURS, ALONE]
    assert [do for _, do in machine.asked][:6] == ["ask", "ask", "settle", "reset", "play", "close"]
    assert machine.hinted == {OURS}
    assert not machine.running
    entry = journal.done[f"{OURS}|1"]
    assert (entry["wall_s"], len(entry["requests"])) == (8.0, 8)
    assert entry["sources"] == {"computed": 56}
    assert entry["hints"] == {"accepted": 8}
    json.dumps(entry)
    bench_in(tmp_path, load)[0].run()
    assert len(played(machine)) == 6, "nothing is measured twice"


def test_a_run_goes_on_with_the_arm_that_it_ended_in(tmp_path: Path, load: Load, machine: Machine):
    machine.dies_at = (PLAIN, 2)
    with pytest.raises(KeyboardInterrupt):
        bench_in(tmp_path, load)[0].run()
    assert not machine.running
    machine.dies_at, machine.asked = ("", 0), []
    bench_in(tmp_path, load)[0].run()
    assert played(machine) == [PLAIN, OURS, ALONE]


def test_what_arms_of_an_earlier_run_were_made_of_is_still_known(
    tmp_path: Path, load: Load, machine: Machine
):
    once = MODE._replace(repetitions=1)
    machine.dies_at = (PLAIN, 1)
    with pytest.raises(KeyboardInterrupt):
        bench_in(tmp_path, load, once)[0].run()
    machine.dies_at, machine.asked = ("", 0), []
    bench, journal = bench_in(tmp_path, load, once)
    bench.run()
    assert played(machine) == [PLAIN]
    assert journal.versions == {name: {"vllm": "0"} for name in (ALONE, OURS, PLAIN)}
    assert all("arm" in entry for entry in journal.done.values())


def test_one_that_cannot_start_is_absent_and_the_others_go_on(tmp_path: Path, load: Load, machine: Machine):
    machine.refused = OURS
    bench, journal = bench_in(tmp_path, load)
    bench.run()
    assert bench.absent[OURS]["error"] == "ended: no such module"
    assert bench.absent[OURS]["python"] == "p"
    assert played(machine) == [ALONE, PLAIN, PLAIN, ALONE]
    assert len(journal.done) == 4


def test_without_time_repetitions_are_left_out_and_it_is_said(tmp_path: Path, load: Load, machine: Machine):
    bench, journal = bench_in(tmp_path, load)
    journal.record(f"{ALONE}|0", arm=ALONE, repetition=0, took_s=1000.0)
    bench.run()
    assert not machine.asked
    assert len(bench.skipped) == 5
    assert bench.skipped[0] == f"no time left for repetition 1 of {OURS}"
