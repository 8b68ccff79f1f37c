"""VLLM hears of every load whatever is wrong with us, and never too early."""

from __future__ import annotations

import pytest

from workmem.engines.vllm.guard import Guard
from workmem.engines.vllm.hearing import Hearing
from workmem.engines.vllm.outcomes import LoadOutcomes
from workmem.engines.vllm.steps import Promise, StepPlan

NOW, ASIDE = (
    Promise(request="a", blocks=(1, 2), is_async=False),
    Promise(request="b", blocks=(5, 6), is_async=True),
)


class Scene:
    """A step with a load that it computes with, and one aside. `has_ended`: nothing writes to blocks any more."""

    def __init__(self) -> None:
        self.outcomes, self.guard = LoadOutcomes(), Guard("worker")
        self.has_ended = True
        self.hearing = Hearing(self.outcomes, self.guard, lambda: self.has_ended)
        self.plan = StepPlan(broken=[NOW, ASIDE])
        self.hearing.begins(self.plan)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError


def test_where_all_is_well_it_is_told_as_it_ended(scene: Scene):
    scene.outcomes.end(NOW, 1, "late")
    scene.outcomes.goes_aside(ASIDE)
    assert scene.hearing.arrived(0.0) == set()
    assert scene.hearing.failed_blocks() == {2}
    scene.hearing.begins(StepPlan())
    scene.outcomes.end(ASIDE, 2, "")
    assert scene.hearing.arrived(0.0) == {"b"}
    assert scene.hearing.failed_blocks() == set()
    report = scene.hearing.report()
    assert report is not None
    assert set(report.loads) == {"a", "b"}
    assert not scene.guard.off


@pytest.mark.parametrize("where", ["arrived", "fail"])
def test_whoever_waits_aside_hears_that_nothing_came_once_nothing_can_come(
    scene: Scene, monkeypatch, where: str
):
    monkeypatch.setattr(scene.outcomes, where, broken)
    scene.has_ended = False
    scene.hearing.fail(scene.plan, "off")
    assert scene.hearing.arrived(0.0) == set()
    scene.has_ended = True
    scene.hearing.begins(StepPlan())
    assert scene.hearing.arrived(0.0) == {"b"}
    assert {5, 6} <= scene.hearing.failed_blocks()
    # Once.
    assert scene.hearing.arrived(0.0) == set()
    assert "ZeroDivisionError" in scene.guard.off


def test_what_cannot_be_told_right_or_wrong_is_wrong(scene: Scene, monkeypatch):
    monkeypatch.setattr(scene.outcomes, "failed_blocks", broken)
    scene.outcomes.end(NOW, 2, "")
    scene.outcomes.end(ASIDE, 2, "")
    assert scene.hearing.arrived(0.0) == {"b"}
    assert scene.hearing.failed_blocks() == {1, 2, 5, 6}


def test_a_report_that_fails_is_none(scene: Scene, monkeypatch):
    monkeypatch.setattr(scene.outcomes, "report", broken)
    assert scene.hearing.report() is None
    assert "ZeroDivisionError" in scene.guard.off
