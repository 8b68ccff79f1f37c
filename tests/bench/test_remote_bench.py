"""What the measurements of the remote tier come to, and that its client says what it moved."""

from __future__ import annotations

import pytest
import remote
import remote_report
from pool_moves import RING_BYTES, Ring

MIB = 1 << 20


def row(system, block, rate, *, op="get", batch=4 * MIB, short=0):
    cell = {"system": system, "op": op, "batch": batch, "block": block}
    return cell | {"bytes_per_s": rate, "cpu_s_per_gib": 1.0, "short": short}


def test_the_best_path_is_the_fastest_object_for_that_batch_and_pairs_are_of_one_round():
    entries = {
        f"moves|{number}": {
            "moves": [
                row("workmem", 65536, 900.0 * speed),
                row("Mooncake", 65536, 300.0 * speed),
                row("Mooncake", MIB, 1000.0 * speed),
                row("Mooncake", 4 * MIB, 800.0 * speed),
            ]
        }
        for number, speed in enumerate((1.0, 0.5, 2.0))
    }
    (found,) = remote_report.moves(entries)
    assert found["best_object"] == MIB
    # A slow round is slow for both.
    assert found["of_best"] == {"median": 0.9, "min": 0.9, "max": 0.9, "n": 3}
    assert found["of_such_blocks"]["median"] == 3.0


def test_what_did_not_arrive_whole_has_no_rate():
    entries = {
        f"moves|{number}": {"moves": [row("workmem", MIB, rate, short=short), row("Mooncake", MIB, 100.0)]}
        for number, (rate, short) in enumerate([(9e9, 3), (80.0, 0)])
    }
    (found,) = remote_report.moves(entries)
    assert found["short"] == 3
    assert found["bytes_per_s"]["max"] == 80.0
    assert found["of_best"]["n"] == 1
    del entries["moves|1"]
    (found,) = remote_report.moves(entries)
    assert found["of_best"] is None
    assert "never whole" in [
        cell
        for column in remote_report.tables(remote_report.summarise(entries))[0].columns
        for cell in column.cells
    ]


def context(remote_s, dram_s, computed_s, *, moved=100, rate=1000.0):
    return {
        "remote": {"ttft_s": remote_s},
        "dram": {"ttft_s": dram_s},
        "computed": {"ttft_s": computed_s},
        "bytes": moved,
        "raw_bytes_per_s": rate,
        "same": True,
    }


def test_the_way_from_the_pool_is_told_in_times_of_what_the_client_needs_for_the_bytes():
    found = remote_report.contexts(
        {"context|0": context(0.32, 0.2, 6.4), "context|1": context(9.0, 0.2, 6.0, moved=0)}
    )
    assert found["pairs"] == 1
    assert found["not_from_the_pool"] == 1
    assert found["way_of_raw"]["median"] == pytest.approx(1.2)
    assert found["remote_of_computed"]["ratio"] == pytest.approx(0.05)


def pressed(arm, number, wall_s, computed):
    return {
        "arm": arm,
        "round": number,
        "wall_s": wall_s,
        "requests": 2,
        "prompt_tokens": 100,
        "computed": computed,
        "token_ids": [[1], [2]],
    }


def test_pressure_counts_the_rounds_behind_the_first_that_all_took():
    entries = {
        f"pressure|{number}|{arm}": pressed(arm, number, wall_s, computed)
        for number in range(3)
        for arm, wall_s, computed in (("vram alone", 10.0, 100), ("vram, dram, pool", 4.0, 30))
    }
    del entries["pressure|2|vram, dram, pool"]
    alone, ours = remote_report.pressure(entries)
    assert (alone["rounds"], ours["rounds"]) == (1, 1)
    assert ours["of_first"] == pytest.approx(2.5)
    assert ours["computed"] == 30
    assert ours["same_answers"] == 2


def test_nothing_measured_is_nothing_told():
    found = remote_report.summarise({})
    assert found == {"moves": [], "flood": {}, "contexts": {}, "pressure": []}
    assert len(remote_report.tables(found)) == 1


def test_the_working_set_is_four_times_the_engines_own_memory():
    for mode in (remote.QUICK, remote.FULL):
        assert 1 / remote.VRAM_SHARE == 4
        # What runs at the same time has to fit.
        assert mode.size.working_set * remote.VRAM_SHARE > remote.IN_FLIGHT * (mode.size.last + 80)


def test_memory_comes_round_and_never_runs_over():
    ring = Ring()
    assert [ring.take(12 * MIB) for _ in range(3)] == [0, 12 * MIB, 0]
    assert ring.take(RING_BYTES) == 0
