"""What the engine benchmark concludes from what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from harness import Journal, in_turns, spread
from systems import System, Worker, WorkerFailed

import engine


def entry(system: str, round_number: int, **fields):
    return {"system": system, "round": round_number, "prompt_tokens": 64, "batch": 1, **fields}


def test_prefill_counts_all_prompts_until_the_last_first_token():
    unit = engine.Unit(100, 2)
    assert engine.speed(unit, [(1.0, 0, 1), (4.0, 1, 1), (5.0, 0, 1), (5.0, 1, 1)]).prefill == 50.0


def test_decode_counts_only_between_the_last_start_and_the_first_end():
    unit = engine.Unit(100, 2)
    events = [(1.0, 0, 1), (2.0, 0, 1), (3.0, 1, 1), (4.0, 0, 1), (4.0, 1, 1), (5.0, 0, 1), (9.0, 1, 1)]
    # Between second 3 and second 5: two tokens at 4, one at 5.
    assert engine.speed(unit, events).decode == 1.5


@pytest.mark.parametrize(
    ("events", "message"),
    [([(1.0, 0, 1)], "1 of 2 prompts"), ([(1.0, 0, 1), (2.0, 0, 1), (3.0, 1, 1)], "ended before")],
)
def test_events_that_cannot_tell_are_refused(events, message: str):
    with pytest.raises(WorkerFailed, match=message):
        engine.speed(engine.Unit(100, 2), events)


def test_decode_runs_long_enough_for_prompts_that_finish_one_after_the_other():
    assert engine.Unit(4096, 1).max_tokens == engine.DECODE_TOKENS + 1
    assert engine.Unit(4096, 16).max_tokens > 4096 * 16 // engine.PIECE_TOKENS


def test_ratios_pair_within_a_round():
    entries = [
        entry(engine.OURS, 0, prefill=100.0, decode=1.0),
        entry("peer", 0, prefill=50.0, decode=2.0),
        entry(engine.OURS, 1, prefill=30.0, decode=1.0),
        entry("peer", 1, prefill=10.0, decode=2.0),
        entry("peer", 2, prefill=1.0, decode=9.0),
    ]
    decode, ratio = engine.ratios(dict(enumerate(entries)), engine.OURS)
    assert ratio["against"] == decode["against"] == "peer"
    assert decode["ratio"]["median"] == 0.5
    assert ratio["ratio"] == {"median": 2.5, "min": 2.0, "max": 3.0, "n": 2}


def test_a_skipped_unit_is_a_row_with_its_reason():
    rows = engine.summarise({"u": entry("peer", 0, skipped="would take about 99 s")})
    assert [row["kind"] for row in rows] == ["decode", "prefill"]
    assert all(row["skipped"] == ["would take about 99 s"] for row in rows)
    assert not any("tokens_per_s" in row for row in rows)


def test_every_second_round_goes_backwards():
    assert in_turns(["a", "b", "c"], 0) == ["a", "b", "c"]
    assert in_turns(["a", "b", "c"], 1) == ["c", "b", "a"]


def test_a_journal_resumes_the_same_configuration_only(tmp_path: Path):
    path = tmp_path / "run.partial.jsonl"
    Journal(path, {"seed": 1}).record("a", prefill=2.0)
    with path.open("a") as file:
        file.write('{"unit": "half wri')
    resumed = Journal(path, {"seed": 1})
    assert resumed.done["a"]["prefill"] == 2.0
    assert list(resumed.done) == ["a"]
    assert Journal(path, {"seed": 2}).done == {}


def test_spread_of_one_value():
    assert spread([3.0]) == {"median": 3.0, "min": 3.0, "max": 3.0, "n": 1}


WORKER = """
import sys
sys.path.insert(0, {workers!r})
from protocol import serve

def load(options):
    print("libraries print to stdout", flush=True)
    def run(prompts, max_tokens):
        if max_tokens == 0:
            raise ValueError("nothing to do")
        return [(0.5 * (step + 1), index, 1) for step in range(max_tokens) for index in range(len(prompts))]
    return {{"threads": options["threads"]}}, run

serve(load)
"""


@pytest.fixture
def worker(tmp_path: Path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(workers=str(Path(engine.__file__).parent / "workers")))
    system = System("scripted", Path(sys.executable), str(script), {"threads": 2})
    worker = Worker(system, tmp_path / "log", 30.0)
    yield worker
    worker.close()


def test_a_worker_answers_between_pauses(worker: Worker):
    assert worker.versions == {"threads": 2}
    worker.pause()
    worker.resume()
    assert worker.run([[1, 2], [3]], 2, 10.0) == [(0.5, 0, 1), (0.5, 1, 1), (1.0, 0, 1), (1.0, 1, 1)]


def test_a_stopped_worker_is_told_by_its_silence(worker: Worker):
    worker.pause()
    with pytest.raises(WorkerFailed, match="no answer within 0 s"):
        worker.run([[1]], 1, 0.1)


def test_a_worker_reports_what_its_library_raised(worker: Worker):
    with pytest.raises(WorkerFailed, match="ValueError: nothing to do"):
        worker.run([[1]], 0, 10.0)


def test_committed_results_name_their_machine():
    for path in (Path(engine.__file__).parent / "results").glob("*.json"):
        result = json.loads(path.read_text())
        assert {"cpu", "cores", "load_1m", "versions", "date"} <= result["machine"].keys()
        assert any(result.get(name) for name in ("rows", "many_blocks", "moves"))
