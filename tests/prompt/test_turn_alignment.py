import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.prompt.turn_alignment import align, call_arguments, canonical_json

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=6), below, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=4)


def message(*calls, content=""):
    made = [{"id": "x", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": content, "tool_calls": made}


def written(name, arguments, **spelling):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, **spelling)}\n</tool_call>"


def check(parts, generated, rendered):
    """Parts cover the rendering in order, and only calls' arguments differ by more than white space."""
    assert parts[0].start == parts[0].rendered_start == 0
    assert parts[-1].rendered_end == len(rendered)
    for one, other in itertools.pairwise(parts):
        assert (one.end, one.rendered_end) == (other.start, other.rendered_start)
    for part in parts:
        here, there = generated[part.start : part.end], rendered[part.rendered_start : part.rendered_end]
        assert "".join(here.split()) == "".join(there.split()) or json.loads(here) == json.loads(there)


@pytest.mark.parametrize(
    ("generated", "rendered", "is_same"),
    [
        ("Paris.", "Paris.", True),
        ("Paris.\nUser:", "Paris.", True),
        ("Paris. ", "Paris.", True),
        ("Paris.", "Paris. ", False),
        ("Paris.", "paris.", False),
        (" Paris.", "Paris.", False),
        ('{"a":1}', '{"a": 1}', False),
    ],
)
def test_text_is_the_same_to_the_character_up_to_where_the_rendering_ends(generated, rendered, is_same):
    parts = align(generated, rendered, {"role": "assistant", "content": rendered})
    assert (parts is not None) == is_same
    if parts:
        check(parts, generated, rendered)


@pytest.mark.parametrize(
    ("generated", "arguments", "is_same"),
    [
        ('<tool_call>\n{"name":"ls","arguments":{"path":"."}}\n</tool_call>', {"path": "."}, True),
        ('<tool_call>{"name": "ls", "arguments": {"path": "\\u002e"}}</tool_call>\n', {"path": "."}, True),
        (
            '\n<tool_call>\n{"name": "ls", "arguments": {"b": 1.0, "a": 2}}</tool_call>',
            {"a": 2, "b": 1},
            True,
        ),
        ('<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>', {}, True),
        ('<tool_call>\n{"name": "ls", "arguments": {"path": ".."}}\n</tool_call>', {"path": "."}, False),
        ('<tool_call>\n{"name": "ls", "arguments": {"n": 1}}\n</tool_call>', {"n": True}, False),
        ('<tool_call>\n{"name": "ls", "arguments": {"n": "1"}}\n</tool_call>', {"n": 1}, False),
        ('<tool_call>\n{"name": "rm", "arguments": {"path": "."}}\n</tool_call>', {"path": "."}, False),
        ('{"name": "ls", "arguments": {"path": "."}}', {"path": "."}, False),
        ('<tool_call>\n{"name": "ls", "arguments": {"path": "."}}', {"path": "."}, False),
        (
            'Sure.\n<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>',
            {"path": "."},
            False,
        ),
    ],
)
def test_a_call_is_the_same_however_its_arguments_are_spelled(generated, arguments, is_same):
    rendered = written("ls", arguments)
    parts = align(generated, rendered, message(("ls", json.dumps(arguments))))
    assert (parts is not None) == is_same
    if parts:
        check(parts, generated, rendered)


def test_what_is_said_before_a_call_is_part_of_it():
    call = message(("ls", '{"path":"."}'), content="Let me { look.")
    rendered = "Let me { look.\n" + written("ls", {"path": "."})
    generated = "Let me { look.\n\n" + written("ls", {"path": "."}, separators=(",", ":"))
    parts = align(generated, rendered, call)
    check(parts, generated, rendered)
    assert align(generated.replace("look", "Look"), rendered, call) is None
    # A text whose spaces differ is another text, beside a call too.
    assert align(generated.replace("me {", "me  {"), rendered, call) is None


@settings(max_examples=200, deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(["ls", "get_weather"]), ARGUMENTS), min_size=1, max_size=3),
    content=st.text(max_size=12),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_any_spelling_of_any_calls_is_aligned(calls, content, ascii_only, indent):
    said = [(name, json.dumps(arguments, sort_keys=True)) for name, arguments in calls]
    rendered = "\n".join([content, *(written(name, arguments) for name, arguments in calls)])
    generated = "\n ".join(
        [content, *(written(n, a, ensure_ascii=ascii_only, indent=indent, sort_keys=True) for n, a in calls)]
    ).replace('{"arguments', '{"arguments')
    turned = [written(name, arguments, ensure_ascii=ascii_only, indent=indent) for name, arguments in calls]
    parts = align("\n ".join([content, *turned]), rendered, message(*said, content=content))
    assert parts is not None
    # `name` after `arguments` is another wording of the call itself, and is left alone.
    assert align(generated, rendered, message(*said, content=content)) is None


@settings(max_examples=200, deadline=None)
@given(one=ARGUMENTS, other=ARGUMENTS)
def test_other_arguments_are_never_taken_for_the_same(one, other):
    rendered = written("ls", one)
    parts = align(written("ls", other), rendered, message(("ls", json.dumps(one))))
    assert (parts is not None) == (canonical_json(one) == canonical_json(other))


@given(JSON_VALUES)
def test_a_canonical_spelling_means_what_it_spells(value):
    assert json.loads(canonical_json(value)) == value
    assert canonical_json(json.loads(canonical_json(value))) == canonical_json(value)


def test_numbers_are_one_where_every_reader_has_them_so():
    assert canonical_json({"n": 1.0}) == canonical_json({"n": 1})
    assert canonical_json(2**53 + 1) != canonical_json(float(2**53))
    assert canonical_json(True) != canonical_json(1)


def test_arguments_that_are_no_json_are_taken_as_they_are():
    assert call_arguments({"function": {"arguments": "{broken"}}) == "{broken"
    assert call_arguments({"function": {"arguments": " "}}) == {}
    assert call_arguments({"function": {"arguments": {"a": 1}}}) == {"a": 1}
    assert call_arguments({}) == {}
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    rendered = f"<tool_call>{deep}</tool_call>"
    assert align(rendered, rendered, message(("ls", deep))) is None
