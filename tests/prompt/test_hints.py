"""Hints are advice: what can be read is read by all roads, what cannot is named, and nothing is an error."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.core.hints import Kind
from workmem.prompt.hints import ACTIONS_MAX, read_hints


class Action(msgspec.Struct, frozen=True):
    """As vLLM has it."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class Envelope(msgspec.Struct, frozen=True):
    protocol_version: str
    message_id: str
    actions: list[Action]


def test_all_roads_lead_to_the_same():
    action = Action("a", "Pin", "1", {"ttl_s": 5, "priority": 2})
    envelope = Envelope("1", "m", [action])
    plain = msgspec.to_builtins(envelope)
    roads = [
        read_hints(envelope, None, "s"),
        read_hints(None, {"workmem": plain}, "s"),
        read_hints(None, {"kv_hints": plain}, "s"),
        read_hints(None, {"workmem": {**plain, "session_id": "s"}}, None),
    ]
    for hints in roads:
        assert hints == roads[0]
        assert hints.session == "s"
        (read,) = hints.actions
        assert (read.kind, read.payload.ttl_s, read.payload.priority) == (Kind.PIN, 5, 2)


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ({"action_type": "Melt"}, "Melt"),
        ({"action_type": "Pin", "payload": {"ttl_s": -1}}, "ttl_s"),
        ({"action_type": "Pin", "payload": {"tokens": 0}}, "tokens"),
        ({"action_type": "Pin", "payload": {"priority": 10**9}}, "priority"),
        ({"action_type": "Pin", "action_version": "2"}, "action_version"),
        ({"action_type": "Share"}, "payload.group"),
        ({"action_type": "Demote", "payload": {"session": "x" * 257}}, "session"),
        ({"action_type": "Demote", "payload": {"session": "\ud800"}}, "printed"),
        ({"payload": {}}, "action_type"),
        ("Pin", "object"),
    ],
)
def test_what_cannot_be_done_is_named_and_the_next_is_read(action, why):
    hints = read_hints(None, {"workmem": {"actions": [action, {"action_type": "Retain"}]}}, None)
    assert [one.kind for one in hints.actions] == [Kind.RETAIN]
    (told,) = hints.outcomes
    assert told.outcome == "rejected"
    assert why in told.why
    assert told.id == "kv_transfer_params.workmem.actions[0]"


@pytest.mark.parametrize("envelope", [7, "Pin", [], {"actions": {}}, {"actions": None}, True])
def test_what_is_no_envelope_is_named(envelope):
    hints = read_hints(None, {"workmem": envelope}, None)
    assert [one.outcome for one in hints.outcomes] == ["rejected"]


def test_so_many_are_read_and_no_more():
    many = {"actions": [{"action_type": "Retain"}] * (ACTIONS_MAX + 5)}
    hints = read_hints(None, {"workmem": many, "kv_hints": many}, None)
    assert len(hints.actions) == ACTIONS_MAX
    assert {one.outcome for one in hints.outcomes} == {"clipped"}
    assert len(hints.outcomes) == 2


def test_a_session_that_is_no_name_is_none():
    assert read_hints(None, {"workmem": {"session_id": 7}}, "x" * 300).session == ""


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["actions", "action_type", "payload", "ttl_s", "session", "session_id", "workmem", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    envelope=anything, params=st.none() | st.dictionaries(st.sampled_from(["workmem", "kv_hints"]), anything)
)
def test_nothing_is_an_error(envelope, params):
    hints = read_hints(envelope, params, None)
    for action in hints.actions:
        ttl = action.payload.ttl_s
        assert ttl is None or ttl > 0 or math.isnan(ttl)
    assert len(hints.actions) <= ACTIONS_MAX
    msgspec.json.encode([one.told() for one in hints.outcomes])
