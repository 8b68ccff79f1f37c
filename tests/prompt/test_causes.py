"""Each cause of a miss is named, at its place, in every API; a request that continues another one has none."""

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.prompt.talks import DIALECTS, Call, Talk, Turn, function_path, schema_key, system_path, tool

from workmem.prompt.causes.answers import Made, MadeCall
from workmem.prompt.causes.cause import KINDS
from workmem.prompt.causes.diagnose import diagnose
from workmem.prompt.dialects.messages import MESSAGES

SYSTEM = """You are a careful travel assistant. Follow the policy below to the letter.
Never book without a confirmed payment method.
Ask for the user id first, then look up the reservation.
Refunds take five to seven business days.
Speak briefly and say what you did."""

TOOLS = [
    tool(
        "get_user",
        "Look up a user.\nModes:\n- fast\n- full",
        {"id": {"type": "string"}, "full": {"type": "boolean"}},
        ["id", "full"],
    ),
    tool(
        "search_flights",
        "Find direct flights.",
        {"from": {"type": "string"}, "to": {"type": "string"}},
        ["from", "to"],
    ),
    tool("book", "Book a flight.", {"flight": {"type": "string"}}, ["flight"]),
]


def talk():
    return Talk(
        SYSTEM,
        copy.deepcopy(TOOLS),
        [
            Turn("user", "I want to fly from Berlin to Rome next week, user id is mia_li_1."),
            Turn(
                "assistant",
                "",
                "The id is given, so look it up.",
                [Call("get_user", '{"id": "mia_li_1", "full": true}', "call_1")],
            ),
            Turn("tool", '{"name": "Mia Li", "tier": "gold"}', id="call_1"),
            Turn("assistant", "Welcome back, Mia. Which day suits you?"),
            Turn("user", "Thursday, in the morning if there is one."),
        ],
    )


def continued():
    after = talk()
    after.turns += [
        Turn(
            "assistant", "", "Search now.", [Call("search_flights", '{"from": "BER", "to": "FCO"}', "call_2")]
        ),
        Turn("tool", '["LH1840 07:05", "U2 5011 09:20"]', id="call_2"),
    ]
    return after


def turn_path(dialect, number, talk):
    """Path of turn `number`; in Responses a turn is as many items as it has pieces."""
    if dialect.name == "messages":
        return f"messages[{number}]"
    if dialect.name == "chat":
        return f"messages[{number + 1}]"
    items = sum(
        1
        if turn.role == "tool"
        else bool(turn.thinking) + bool(turn.text or not turn.calls) + len(turn.calls)
        for turn in talk.turns[:number]
    )
    return f"input[{items}]"


def found(before, after, dialect, **more):
    return [
        (one.name, one.path) for one in diagnose(before.body(dialect), after.body(dialect), dialect, **more)
    ]


def with_tool(after, number, change):
    change(after.tools[number])
    return after


each = pytest.mark.parametrize("dialect", DIALECTS, ids=[dialect.name for dialect in DIALECTS])


@each
def test_a_request_that_continues_another_has_no_cause(dialect):
    assert found(talk(), continued(), dialect) == []
    assert found(talk(), talk(), dialect) == []


@each
def test_the_beginning_of_an_earlier_request_has_no_cause(dialect):
    assert found(continued(), talk(), dialect) == []


@each
@pytest.mark.parametrize("nonce", ["cc_version=2.1.332.3f1; cch=00ab1;", ""])
def test_a_billing_line_that_changes_is_named(dialect, nonce):
    before, after = talk(), continued()
    before.system = f"x-anthropic-billing-header: cc_version=2.1.332.1a2; cch=8ab31;\n{SYSTEM}"
    after.system = f"x-anthropic-billing-header: {nonce}\n{SYSTEM}" if nonce else SYSTEM
    assert found(before, after, dialect) == [("billing_header", system_path(dialect))]


def test_a_billing_line_in_a_block_of_its_own_is_named():
    before, after = talk().body(MESSAGES), continued().body(MESSAGES)
    for body, nonce in ((before, "1"), (after, "2")):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cch={nonce};"}
        body["system"] = [header, {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    (one,) = diagnose(before, after, MESSAGES)
    assert (one.name, one.path, one.rule) == ("billing_header", "system[0].text", "attribution_header")


@each
def test_tools_in_another_order_are_named_at_the_first_that_moved(dialect):
    after = continued()
    after.tools = [after.tools[0], after.tools[2], after.tools[1]]
    assert found(talk(), after, dialect) == [("tool_order", "tools[1]")]


@each
def test_keys_of_a_schema_in_another_order_are_named_where_they_are(dialect):
    after = continued()
    properties = after.tools[1]["schema"]["properties"]
    after.tools[1]["schema"]["properties"] = dict(reversed(properties.items()))
    path = f"{function_path(dialect, 1)}.{schema_key(dialect)}.properties"
    assert found(talk(), after, dialect) == [("schema_key_order", path)]


@each
def test_required_in_another_order_is_named(dialect):
    after = continued()
    after.tools[1]["schema"]["required"].reverse()
    path = f"{function_path(dialect, 1)}.{schema_key(dialect)}.required"
    assert found(talk(), after, dialect) == [("required_order", path)]


@each
def test_required_and_keys_in_another_order_are_both_named(dialect):
    after = continued()
    schema = after.tools[1]["schema"]
    schema["required"].reverse()
    after.tools[1]["schema"] = dict(reversed(schema.items()))
    assert [name for name, _ in found(talk(), after, dialect)] == ["required_order", "schema_key_order"]


@each
def test_the_order_of_an_enum_is_not_taken_for_form(dialect):
    before, after = talk(), continued()
    for one, values in ((before, ["asc", "desc"]), (after, ["desc", "asc"])):
        one.tools[0]["schema"]["properties"]["sort"] = {"enum": values}
    ((name, path),) = found(before, after, dialect)
    assert name == "tool_changed"
    assert path.endswith("properties.sort.enum")


@each
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_new_tool_is_named_and_those_behind_it_are_not(dialect, place):
    after = continued()
    after.tools.insert(place, tool("weather", "Tell the weather.", {"city": {"type": "string"}}))
    assert found(talk(), after, dialect) == [("tool_added", f"tools[{place}]")]


@each
def test_a_tool_that_is_gone_is_named(dialect):
    after = continued()
    del after.tools[1]
    assert found(talk(), after, dialect) == [("tool_removed", "tools[1]")]
    after.tools.clear()
    assert found(talk(), after, dialect) == [("tool_removed", "tools")]


@each
def test_a_tool_of_another_version_says_what_changed(dialect):
    after = with_tool(continued(), 2, lambda one: one.update(description="Book a flight, and pay for it."))
    assert found(talk(), after, dialect) == [("tool_changed", f"{function_path(dialect, 2)}.description")]
    after = with_tool(continued(), 2, lambda one: one["schema"]["properties"].update(seat={"type": "string"}))
    path = f"{function_path(dialect, 2)}.{schema_key(dialect)}.properties.seat"
    assert found(talk(), after, dialect) == [("tool_changed", path)]


@each
def test_a_list_in_a_description_in_another_order_is_named(dialect):
    after = with_tool(
        continued(), 0, lambda one: one.update(description="Look up a user.\nModes:\n- full\n- fast")
    )
    path = f"{function_path(dialect, 0)}.description"
    assert found(talk(), after, dialect) == [("tool_description_order", path)]


@each
def test_arguments_written_another_way_are_named(dialect):
    after = continued()
    call = after.turns[1].calls[0]
    # Anthropic's API has objects, whose spaces are nobody's; the order of their keys stays.
    turned = dict(reversed(json.loads(call.arguments).items()))
    call.arguments = json.dumps(turned, separators=(",", ":"))
    ((name, path),) = found(talk(), after, dialect)
    assert name == "arguments_reserialised"
    ends = {
        "chat": "messages[2].tool_calls[0].function.arguments",
        "responses": "input[2].arguments",
        "messages": "messages[1].content[1].input",
    }
    assert path == ends[dialect.name]


@each
def test_another_id_of_a_call_is_named(dialect):
    after = continued()
    after.turns[1].calls[0].id = after.turns[2].id = "toolu_9"
    ends = {
        "chat": "messages[2].tool_calls[0].id",
        "responses": "input[2].call_id",
        "messages": "messages[1].content[1].id",
    }
    assert found(talk(), after, dialect) == [("call_id_changed", ends[dialect.name])]


@each
def test_thinking_that_was_not_sent_back_is_named(dialect):
    after = continued()
    after.turns[1].thinking = ""
    ((name, path),) = found(talk(), after, dialect)
    assert name == "reasoning_dropped"
    assert path.startswith(turn_path(dialect, 1, talk()))


@each
@pytest.mark.parametrize(("gap", "place"), [(slice(0, 3), "front"), (slice(2, 4), "middle")])
def test_messages_that_are_gone_are_named(dialect, gap, place):
    after = continued()
    del after.turns[gap]
    (one,) = diagnose(talk().body(dialect), after.body(dialect), dialect)
    assert (one.name, one.path) == ("history_trimmed", turn_path(dialect, gap.start, talk()))
    assert f"from the {place}" in one.what


@each
def test_a_message_with_another_text_is_named(dialect):
    after = continued()
    after.turns[3].text = "Welcome back, Mia Li. Which day suits you?"
    ((name, path),) = found(talk(), after, dialect)
    assert name == "history_rewritten"
    assert path.startswith(turn_path(dialect, 3, talk()))


@each
def test_a_message_between_others_is_named(dialect):
    after = continued()
    after.turns.insert(3, Turn("user", "Reminder: be brief."))
    assert found(talk(), after, dialect) == [("message_inserted", turn_path(dialect, 3, talk()))]


@each
def test_one_space_more_is_named_with_its_place(dialect):
    after = continued()
    after.system = SYSTEM.replace("Refunds take", "Refunds  take")
    (one,) = diagnose(talk().body(dialect), after.body(dialect), dialect)
    assert (one.name, one.path) == ("whitespace", system_path(dialect))
    assert f"character {SYSTEM.index('Refunds') + 8}" in one.what


VALUES = [
    ("volatile_time", "Now: 2026-11-29T10:15:03Z", "Now: 2026-11-29T10:16:04Z"),
    ("volatile_date", "Today is Sunday, November 29, 2026.", "Today is Monday, November 30, 2026."),
    ("volatile_date", "Today's date: 2026-11-29", "Today's date: 2026-11-30"),
    (
        "volatile_id",
        "Session 6f1c2a9e-58d3-4b5e-9d56-1f0c7a2b3c4d",
        "Session 0b9d1f77-3c5a-4e21-8a44-5d6e7f809102",
    ),
    ("volatile_path", "Working directory: /home/mia/one", "Working directory: /home/mia/two/three"),
    ("volatile_path", "Current branch: main\n M a.py", "Current branch: main\n M a.py\n?? b.py"),
    ("volatile_version", "CLI version: 2.1.332", "CLI version: 2.1.4"),
]


@each
@pytest.mark.parametrize(("name", "was", "now"), VALUES)
def test_a_value_that_changes_is_named_by_its_kind(dialect, name, was, now):
    before, after = talk(), continued()
    before.system, after.system = f"{was}\n\n{SYSTEM}", f"{now}\n\n{SYSTEM}"
    (one,) = diagnose(before.body(dialect), after.body(dialect), dialect)
    assert (one.name, one.path, one.rule) == (name, system_path(dialect), "volatile_to_tail")


@each
def test_a_value_that_changes_does_not_hide_what_else_does(dialect):
    before, after = talk(), continued()
    before.system = f"Now: 2026-11-29T10:15:03Z\n{SYSTEM}"
    after.system = f"Now: 2026-11-29T10:16:04Z\n{SYSTEM.replace('briefly', 'slowly')}"
    time, edit = diagnose(before.body(dialect), after.body(dialect), dialect)
    assert (time.name, edit.name) == ("volatile_time", "system_changed")
    assert f"at character {after.system.index('slowly')};" in edit.what


@each
def test_a_value_that_changes_in_the_history_is_named_there(dialect):
    before, after = talk(), continued()
    before.turns[0].text = "[Sun 2026-11-29 17:37 UTC] I want to fly from Berlin to Rome."
    after.turns[0].text = "[Sun 2026-11-29 17:38 UTC] I want to fly from Berlin to Rome."
    ((name, path),) = found(before, after, dialect)
    assert name == "volatile_time"
    assert path.startswith(turn_path(dialect, 0, talk()))


@each
def test_values_in_lines_that_only_moved_are_no_change_of_theirs(dialect):
    before, after = talk(), continued()
    lines = ["2026-11-03: flew to Rome", "2026-11-09: paid by card", "2026-11-12: asked for a refund"]
    before.system, after.system = ("\n".join([SYSTEM, *each]) for each in (lines, lines[1:] + lines[:1]))
    assert found(before, after, dialect) == [("unordered_context", system_path(dialect))]


@each
def test_other_instructions_of_the_same_agent_are_named(dialect):
    after = continued()
    after.system = f"Memory: Mia prefers windows.\n{SYSTEM}"
    (one,) = diagnose(talk().body(dialect), after.body(dialect), dialect)
    assert (one.name, one.path) == ("system_changed", system_path(dialect))
    assert f"the {len(SYSTEM)} characters behind it are the same" in one.what


@each
@pytest.mark.parametrize(
    "system",
    [
        "You write titles of three words.",
        SYSTEM.replace("a careful travel assistant", "the booking specialist"),
    ],
)
def test_another_role_in_front_of_a_shared_history_is_named(dialect, system):
    after = continued()
    after.system = system
    assert found(talk(), after, dialect) == [("role_swapped", system_path(dialect))]


@each
def test_pieces_in_another_order_are_named(dialect):
    before, after = talk(), continued()
    pieces = ["1. Mia flew to Rome in May.", "2. Mia likes windows.", "3. Mia pays by card."]
    before.system = SYSTEM + "\n" + "\n".join(pieces)
    after.system = SYSTEM + "\n1. Mia likes windows.\n2. Mia pays by card.\n3. Mia flew to Rome in May."
    assert found(before, after, dialect) == [("unordered_context", system_path(dialect))]


@each
@pytest.mark.parametrize("is_same", [True, False])
def test_a_block_that_is_always_last_is_named(dialect, is_same):
    before, after = talk(), continued()
    block = "Internal context: the weather is fine, open files are a.py and b.py, step "
    before.turns.append(Turn("user", f"{block}1"))
    after.turns.append(Turn("user", f"{block}{1 if is_same else 2}"))
    assert found(before, after, dialect) == [("floating_tail", turn_path(dialect, 5, talk()))]


@each
def test_a_summary_in_place_of_a_history_is_named(dialect):
    before = continued()
    before.turns += [Turn("assistant", "LH1840 it is."), Turn("user", "Fine, and a hotel near the station.")]
    after = talk()
    after.turns = [
        Turn("user", "This session is continued from a previous conversation: Mia flies to Rome."),
        Turn("assistant", "Understood."),
        Turn("user", "Go on."),
    ]
    assert found(before, after, dialect) == [("compaction", turn_path(dialect, 0, talk()))]


@each
def test_another_question_after_a_shared_history_is_a_branch(dialect):
    after = talk()
    after.turns[-1] = Turn("user", "Please cancel everything instead, sorry about that.")
    assert found(talk(), after, dialect) == [("branched", turn_path(dialect, 4, talk()))]


@each
def test_another_conversation_of_the_same_agent_is_new(dialect):
    after = talk()
    after.turns = [Turn("user", "What is your baggage policy?")]
    assert found(talk(), after, dialect) == [("new_conversation", turn_path(dialect, 0, talk()))]


@each
def test_what_broke_the_head_is_named_before_a_new_conversation(dialect):
    after = talk()
    after.tools.reverse()
    after.turns = [Turn("user", "What is your baggage policy?")]
    assert [name for name, _ in found(talk(), after, dialect)] == ["tool_order", "new_conversation"]


@each
def test_another_agent_and_conversation_is_new_and_nothing_else(dialect):
    after = Talk("Write code in Rust.", [TOOLS[1]], [Turn("user", "A function that adds.")])
    assert [name for name, _ in found(talk(), after, dialect)] == ["new_conversation"]


@each
@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model", "model_or_template_options_changed"),
        ("chat_template_kwargs", "model_or_template_options_changed"),
        ("cache_salt", "salt_or_tenant"),
    ],
)
def test_options_of_the_template_and_salts_are_named(dialect, key, name):
    before, after = talk().body(dialect), continued().body(dialect)
    after[key] = {"enable_thinking": False} if key == "chat_template_kwargs" else "other"
    assert [(one.name, one.path) for one in diagnose(before, after, dialect)] == [(name, key)]


@each
def test_all_causes_are_named_in_the_order_of_the_prompt(dialect):
    after = continued()
    after.tools.reverse()
    after.system = SYSTEM.replace("to the letter", "closely")
    after.turns[3].text = "Welcome back, dear Mia. Which day suits you?"
    names = ["tool_order", "system_changed", "history_rewritten"]
    assert [name for name, _ in found(talk(), after, dialect)] == names
    names = ["system_changed", "tool_order", "history_rewritten"]
    assert [name for name, _ in found(talk(), after, dialect, tools_first=False)] == names


@each
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda made: made, None),
        (lambda made: Made(made.text, made.thinking, (MadeCall("search_flights", '{"to": "FCO", "from": "BER"}', "call_2"),)), "arguments_reserialised"),
        (lambda made: Made(made.text, made.thinking, (MadeCall("search_flights", made.calls[0].arguments, "call_b"),)), "call_id_changed"),
        (lambda made: Made(made.text, "Let me search.", made.calls), "reasoning_dropped"),
        (lambda made: Made("Here you go. ", made.thinking, made.calls), "whitespace"),
        (lambda made: Made("Found two.", made.thinking, made.calls), "history_rewritten"),
    ],
)  # fmt: skip
def test_an_answer_that_came_back_otherwise_is_named(dialect, change, name):
    after = continued()
    after.turns[5].text, after.turns[5].thinking = "Here you go.", ""
    made = Made("Here you go.", "", (MadeCall("search_flights", '{"from": "BER", "to": "FCO"}', "call_2"),))
    causes = diagnose(talk().body(dialect), after.body(dialect), dialect, made=change(made))
    assert [one.name for one in causes] == ([] if name is None else [name])


def test_every_cause_says_what_to_do():
    for name, kind in KINDS.items():
        assert kind.why.endswith("."), name
        assert kind.fix.endswith("."), name


def test_the_guide_has_every_cause_with_what_to_do():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "explain.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\*\*`(\w+)`\*\*", guide, re.MULTILINE)) == set(KINDS)
    for kind in KINDS.values():
        assert kind.why in guide
        assert kind.fix in guide


WORDS = st.text("abc xyz\n{}é", max_size=30)
TURNS = st.builds(
    Turn,
    role=st.sampled_from(["user", "assistant", "tool"]),
    text=WORDS,
    thinking=st.just(""),
    calls=st.just([]),
    id=st.sampled_from(["call_1", "call_2"]),
) | st.builds(
    Turn,
    role=st.just("assistant"),
    text=WORDS,
    thinking=WORDS,
    calls=st.lists(
        st.builds(Call, st.just("book"), st.just('{"flight": "LH 1"}'), st.just("call_2")), max_size=2
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    dialect=st.sampled_from(DIALECTS),
    old=st.lists(TURNS, max_size=6),
    new=st.lists(TURNS, max_size=4),
    data=st.data(),
)
def test_no_append_of_any_shape_has_a_cause(dialect, old, new, data):
    before, after = Talk(SYSTEM, TOOLS, old).body(dialect), Talk(SYSTEM, TOOLS, [*old, *new]).body(dialect)
    for body in (before, after):
        mark(body, dialect, data)
    assert diagnose(before, after, dialect) == []


def mark(body, dialect, data):
    """What moves from request to request and is rendered nowhere: marks for caches, ids of items, form of contents."""
    body["metadata"] = {"user_id": data.draw(st.text("ab", max_size=3))}
    if dialect.name == "messages" and data.draw(st.booleans()):
        body["system"] = [{"type": "text", "text": body["system"], "cache_control": {"type": "ephemeral"}}]
    for item in body[dialect.history_key]:
        if dialect.name == "responses":
            item["id"] = data.draw(st.text("ab", max_size=3))
        if isinstance(item.get("content"), str) and item["content"] and data.draw(st.booleans()):
            item["content"] = [{"type": "text", "text": item["content"]}]
        parts = item.get("content")
        if isinstance(parts, list) and parts and data.draw(st.booleans()):
            parts[-1]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    if body["tools"] and data.draw(st.booleans()):
        body["tools"][-1] = {**body["tools"][-1], "cache_control": {"type": "ephemeral"}}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["role", "content", "type", "text", "tools", "function", "name", "parameters", "input_schema", "tool_calls",
         "arguments", "id", "input", "system", "thinking", "summary", "required", "description"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(dialect=st.sampled_from(DIALECTS), fields=st.tuples(JSON, JSON, JSON, JSON))
def test_bodies_of_any_shape_are_compared(dialect, fields):
    key = dialect.history_key
    before, after = {key: fields[0], "tools": fields[1]}, {key: fields[2], "tools": fields[3]}
    for one in diagnose(before, after, dialect):
        assert one.name in KINDS
    assert diagnose(before, before, dialect) == []
