"""The demo's load: real conversations, cut before each assistant message, within a budget."""

from __future__ import annotations

from importlib.resources import files

import pytest

from workmem.demo.runs import AgentRun, airline_runs, choose


def run_of(name: str, *sizes: int) -> AgentRun:
    messages: list[dict[str, str]] = []
    for size in sizes:
        messages += [{"role": "user", "content": "x" * size}, {"role": "assistant", "content": "y"}]
    return AgentRun(name, tuple(messages))


def test_shipped_runs_share_their_policy_and_name_their_licence():
    runs = airline_runs()
    assert len({run.messages[0]["content"] for run in runs}) == 1
    assert all(run.messages[0]["role"] == "system" for run in runs)
    assert len({run.name for run in runs}) == len(runs) == 7
    data = files("workmem.demo").joinpath("data")
    assert "MIT License" in data.joinpath("LICENSE").read_text()
    assert "tau-bench" in data.joinpath("ORIGIN.md").read_text()


def test_a_turn_ends_before_each_assistant_message():
    run = run_of("a", 10, 10)
    assert run.turns == (1, 3)
    assert all(run.messages[turn]["role"] == "assistant" for turn in run.turns)
    # Turn 1 sends the history without turn 0's question to itself: one message, then three.
    assert run.estimated_tokens > run_of("b", 10).estimated_tokens


@pytest.mark.parametrize(("agents", "tokens_max"), [(1, 9_000), (3, 26_000), (5, 66_000), (7, 400_000)])
def test_the_choice_stays_within_its_budget(agents: int, tokens_max: int):
    chosen = choose(airline_runs(), agents=agents, tokens_max=tokens_max)
    assert len(chosen) == agents
    assert len({run.name for run in chosen}) == agents
    assert sum(run.estimated_tokens for run in chosen) <= tokens_max


def test_one_agent_grows_as_long_as_the_budget_lets_it():
    runs = [run_of("tiny", 30), run_of("short", 300), run_of("long", 3000, 3000), run_of("huge", 90_000)]
    budget = sum(run.estimated_tokens for run in runs[:3])
    assert [run.name for run in choose(runs, agents=2, tokens_max=budget)] == ["long", "tiny"]


def test_a_budget_too_small_for_all_gives_fewer_agents():
    runs = [run_of("a", 300), run_of("b", 300)]
    assert len(choose(runs, agents=2, tokens_max=runs[0].estimated_tokens)) == 1
    assert choose(runs, agents=2, tokens_max=1) == []
