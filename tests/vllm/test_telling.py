"""Changes add up to what was counted, of both sides, and every series has a count of its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fake_engine import FakeVllm, Request
from hypothesis import given
from hypothesis import strategies as st
from small import SIZE
from test_pins import Pool

from workmem.engines.vllm.guard import Guard
from workmem.engines.vllm.telling import (
    METRICS,
    Changes,
    added,
    guard_totals,
    scheduler_totals,
    summary,
    worker_totals,
)
from workmem.store.store import Store

PROMPT = list(range(100, 100 + 6 * SIZE + 1))
COUNTS = [count for name, metric in METRICS.items() for count in metric.names(name).values()]


def test_no_two_series_show_the_same_count():
    assert len(COUNTS) == len(set(COUNTS)) > 40


@given(
    st.lists(st.fixed_dictionaries(dict.fromkeys([*COUNTS[:2], "not shown"], st.integers(0, 9))), max_size=8)
)
def test_changes_of_several_times_add_up_to_the_total_up_and_down(times):
    changes, told = Changes(), {}
    for totals in times:
        news = changes.of(Counter(totals))
        assert all(news.values())
        told = added(told, news)
        assert {count: told.get(count, 0) for count in totals if count in COUNTS} == {
            count: total for count, total in totals.items() if count in COUNTS
        }
    assert "not shown" not in told


def test_both_sides_tell_what_they_did(store: Store):
    fake = FakeVllm(store, 32)
    fake.side.levers.bind(Pool(32), longest_tokens=4 * SIZE, step_tokens=SIZE)
    for _ in range(2):
        fake.add(
            Request(f"a{_}", PROMPT, kv_transfer_params={"workmem": {"actions": [{"action_type": "Retain"}]}})
        )
        fake.run()
        assert store.flush(5)
        fake.reset()
    beside = Counter(held_back=2)
    mine = scheduler_totals(fake.side, beside)
    page = fake.worker.page_bytes
    assert {
        count: mine[count]
        for count in (
            "loads_whole",
            "pages_loaded",
            "pages_offered",
            "lever_Retain",
            "hints_accepted",
            "held_back",
        )
    } == {
        "loads_whole": 1,
        "pages_loaded": 6,
        "pages_offered": 6,
        "lever_Retain": 2,
        "hints_accepted": 2,
        "held_back": 2,
    }
    theirs = worker_totals(fake.worker)
    assert (theirs["pages_stored"], theirs["bytes_saved"], theirs["bytes_loaded"]) == (6, 6 * page, 6 * page)
    assert set(mine) & set(theirs) == set()
    assert summary(added(mine, theirs)) == {
        "pages_loaded": 6,
        "pages_stored": 6,
        "bytes_loaded": 6 * page,
        "bytes_saved": 6 * page,
    }
    fake.close()


def test_a_load_that_fell_short_is_counted_by_why(store: Store):
    from workmem.engines.vllm.steps import Loaded, StepReport

    fake = FakeVllm(store, 32)
    for why in ("corrupt", "late", "no room", "a bug", ""):
        fake.side.heard(StepReport({"gone": Loaded("gone", 0, why)}))
    found = scheduler_totals(fake.side)
    assert {count: n for count, n in found.items() if count.startswith("loads_")} == {
        "loads_corrupt": 1,
        "loads_late": 1,
        "loads_no room": 1,
        "loads_other": 1,
        "loads_whole": 1,
    }
    fake.close()


def test_what_is_off_is_a_level_and_a_bug_a_count():
    guard = Guard("worker")
    assert not any(guard_totals("worker", guard).values())
    guard.call(lambda: 1 / 0, None)
    assert guard_totals("worker", guard) == {"bugs_worker": 1, "off_worker": 1}
    assert METRICS["off"].is_level


def test_the_guide_has_them_all():
    guide = (Path(__file__).parents[2] / "docs/guides/vllm.md").read_text(encoding="utf-8")
    missing = {
        name
        for name, metric in METRICS.items()
        if f"`{name}{'' if metric.is_level else '_total'}`" not in guide
    }
    assert not missing
