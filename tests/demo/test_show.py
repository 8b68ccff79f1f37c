"""The whole demo, small: three real servers, the real model."""

from __future__ import annotations

import asyncio

import pytest

from workmem.demo import report, show
from workmem.demo.runs import AgentRun, airline_runs


def short_run() -> AgentRun:
    """A conversation of some two hundred tokens: a piece of the policy, and two turns."""
    recorded = airline_runs()[1].messages
    policy = {"role": "system", "content": recorded[0]["content"][:400]}
    return AgentRun("short", (policy, *recorded[1:5]))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_reuse_saves_work_and_changes_no_answer_even_after_a_restart(smollm2):
    run = short_run()
    settings = (
        f"engine.model={smollm2}",
        "engine.dtype=fp32",
        "engine.deterministic=true",
        "engine.threads=1",
    )
    plan = show.Plan(runs=(run,), settings=settings, max_tokens=4)
    named, seen = [], []
    phases = asyncio.run(show.run(plan, on_phase=named.append, on_turn=seen.append))
    assert named == [name for name, _ in show.PHASES]
    assert len(seen) == plan.turns * len(show.PHASES)
    off, on, after = report.summarise(phases)
    assert off.computed_tokens == off.prompt_tokens == on.prompt_tokens == after.prompt_tokens
    assert on.hit_rate_by_tier["vram"] > 0.3
    assert after.hit_rate_by_tier["ssd"] > 0.3
    assert after.hit_rate > 0.9
    assert on.same_answers == after.same_answers == off.turns
