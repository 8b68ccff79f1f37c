import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.core.hints import Kind
from workmem.prompt.hint_dialects import hints_of
from workmem.prompt.hints import ACTIONS_MAX

HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("body", "kind", "ttl_s"),
    [
        ({"workmem": {"actions": [{"action_type": "Pin", "payload": {"ttl_s": 9}}]}}, Kind.PIN, 9),
        ({"kv_hints": {"actions": [{"action_type": "Prefetch"}]}}, Kind.PREFETCH, None),
        ({"agent_hint": {"cache_control": {"type": "ephemeral", "ttl": 90}}}, Kind.RETAIN, 90),
        ({"agent_hint": {"cache_control": {"type": "ephemeral", "ttl": 0}}}, Kind.DEMOTE, None),
        ({"agent_hint": {"context_management": {"edits": [{"type": "offload"}]}}}, Kind.DEMOTE, None),
        ({"agent_hint": {"context_management": {"edits": [{"type": "prefetch"}]}}}, Kind.PREFETCH, None),
        ({"nvext": HOUR}, Kind.RETAIN, 3600),
        ({"vllm_xargs": {"agentic_context": {"kv_retention_ttl_seconds": 5}}}, Kind.RETAIN, 5),
        ({"kv_transfer_params": {"lmcache_retention_ttl_sec": 60}}, Kind.RETAIN, 60),
        ({"prompt_cache_retention": "24h"}, Kind.RETAIN, 86400),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}, Kind.RETAIN, 1800),
        (HOUR, Kind.RETAIN, 3600),
        ({"system": [{"type": "text", "text": "x", **HOUR}]}, Kind.RETAIN, 3600),
        ({"tools": [{"name": "t", **HOUR}]}, Kind.RETAIN, 3600),
        (
            {
                "system": [{"cache_control": {"type": "ephemeral", "ttl": "5m"}}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "x", **HOUR}]}],
            },
            Kind.RETAIN,
            3600,
        ),
    ],
)
def test_each_dialect_is_read(body, kind, ttl_s):
    hints = hints_of({}, body)
    assert [(action.kind, action.payload.ttl_s) for action in hints.actions] == [(kind, ttl_s)]
    assert hints.outcomes == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt_cache_retention": "in_memory"},
        {"system": [{"cache_control": {"type": "ephemeral"}}]},
        {"cache_control": {"ttl": True}},
        {"cache_control": {"ttl": "soon"}},
        {"cache_control": {"ttl": float("inf")}},
        {"workmem": {"reuse": False}},
    ],
)
def test_what_asks_for_nothing_is_no_hint(body):
    hints = hints_of({}, body)
    assert (hints.actions, hints.outcomes, hints.priority) == ([], [], 0)


def test_a_session_that_says_it_is_over_is_let_go():
    (action,) = hints_of({"x-dynamo-session-final": "True"}, {}).actions
    assert action.kind is Kind.DEMOTE
    assert hints_of({"x-dynamo-session-final": "0"}, {}).actions == []


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        ({"nvext": {"agent_hints": {"priority": 5}}}, 5),
        ({"nvext": {"agent_hints": {"priority": 5, "strict_priority": 7}}}, 7),
        ({"nvext": {"agent_hints": {"priority": 10**9}}}, 100),
        ({"nvext": {"agent_hints": {"priority": "high"}}}, 0),
        ({"vllm_xargs": {"agentic_context": {"priority": -3}}}, -3),
        ({"nvext": {"agent_hints": {"priority": 5}}, "kv_transfer_params": {"workmem": {"priority": 9}}}, 9),
    ],
)
def test_priorities_of_others(body, priority):
    assert hints_of({}, body).priority == priority


NAMES = [
    "workmem", "kv_hints", "nvext", "agent_hint", "agent_hints", "cache_control", "ttl", "actions", "action_type",
    "system", "tools", "messages", "content", "context_management", "edits", "type", "vllm_xargs",
    "agentic_context", "kv_transfer_params", "priority", "prompt_cache_retention",
]  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["1h", "prefetch", "Pin", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=15,
)


@given(st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=6))
def test_whatever_is_sent_is_no_error_and_bounded(body):
    hints = hints_of({}, body)
    assert len(hints.actions) <= ACTIONS_MAX
    assert -100 <= hints.priority <= 100
