"""Canonicalising as a whole: the same meaning comes out, in one form, and a second time changes nothing."""

import copy
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.prompt.canonical.bodies import asked, shuffled

from workmem.core.errors import ConfigError
from workmem.prompt.canonical.canonicalise import canonicalise
from workmem.prompt.canonical.rules import DEFAULT_RULES, RULES, chosen_rules
from workmem.prompt.dialects.chat import CHAT
from workmem.prompt.dialects.messages import MESSAGES

LOSSLESS = frozenset(rule.name for rule in RULES if rule.kind == "lossless")
encode = msgspec.json.encode


def canonical(body, dialect, chosen=DEFAULT_RULES):
    return canonicalise(copy.deepcopy(body), dialect, chosen)


@settings(deadline=None)
@given(asked)
def test_a_second_time_changes_nothing(one):
    dialect, body = one
    for chosen in (DEFAULT_RULES, LOSSLESS, frozenset(rule.name for rule in RULES)):
        once = canonical(body, dialect, chosen).body
        again = canonical(once, dialect, chosen)
        assert encode(again.body) == encode(once)
        assert again.applied == ()


@settings(deadline=None)
@given(asked)
def test_no_rule_no_change(one):
    dialect, body = one
    assert encode(canonical(body, dialect, frozenset()).body) == encode(body)


@settings(deadline=None)
@given(asked)
def test_what_changed_is_reported_and_nothing_else(one):
    dialect, body = one
    found = canonical(body, dialect)
    changed = {key for key in body if encode(body[key]) != encode(found.body.get(key))}
    assert changed <= found.fields
    assert (encode(body) != encode(found.body)) == bool(found.applied)


@settings(deadline=None)
@given(asked, st.integers(0, 99))
def test_the_order_of_keys_does_not_matter(one, seed):
    dialect, body = one
    once, again = canonical(body, dialect).body, canonical(shuffled(body, seed), dialect).body
    assert encode(again.get("tools")) == encode(once.get("tools"))


@settings(deadline=None)
@given(asked)
def test_paths_are_those_of_the_client(one):
    dialect, body = one
    found = canonical(body, dialect)
    for place in dialect.tools(found.body):
        was = found.client_path(place.path)
        before = {before.path: before for before in dialect.tools(body)}
        assert before[was].name == place.name
        assert before[was].function.get("description") == place.function.get("description")


def test_a_thousand_bodies_with_their_keys_shuffled_come_out_as_the_same_bytes():
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Does {name}.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string", "x-hint": {"b": [{"d": 1, "c": 2}], "a": 1}},
                        "mode": {"enum": ["r", "w"], "type": "string"},
                    },
                    "required": ["path", "mode"],
                },
            },
        }
        for name in ("read", "write", "list_files")
    ]
    seen = set()
    for seed in range(1000):
        mixed = shuffled(tools, seed)
        random.Random(seed).shuffle(mixed)
        seen.add(encode(canonical({"messages": [], "tools": mixed}, CHAT).body["tools"]))
    assert len(seen) == 1


def test_rules_are_chosen_by_name_and_a_wrong_name_is_refused_with_the_right_ones():
    assert chosen_rules({"tool_order": False}) == DEFAULT_RULES - {"tool_order"}
    with pytest.raises(ConfigError, match=r"no rule is named 'tool_odor'; there are .*tool_order"):
        chosen_rules({"tool_odor": True})


def test_no_rule_that_the_model_can_see_is_on_by_default():
    assert {rule.kind for rule in RULES if rule.default} == {"lossless"}
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_moves_of_two_rules_are_told_apart():
    body = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "You are Claude."},
        ],
        "tools": [{"name": "b", "input_schema": {}}, {"name": "a", "input_schema": {}}],
        "messages": [],
    }
    found = canonical(body, MESSAGES)
    assert found.client_path("system[0].text") == "system[1].text"
    assert found.client_path("tools[0].input_schema") == "tools[1].input_schema"
    assert found.client_path("messages[0].content") == "messages[0].content"
    assert found.counts == {"attribution_header": 1, "tool_order": 2}
