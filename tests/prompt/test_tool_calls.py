import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workmem.prompt.tool_calls import ParsedCall, ToolCallParser

NAMES = ("get_weather", "search")
PARIS = ParsedCall("get_weather", '{"city": "Paris"}')
ROME = ParsedCall("get_weather", '{"city": "Rome"}')


def parse_tool_calls(text: str, names) -> tuple[str, list[ParsedCall]]:
    """The text outside of calls, and the calls, of a whole answer."""
    parser = ToolCallParser(names)
    pieces = [*parser.feed(text), *parser.finish()]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece for piece in pieces if isinstance(piece, ParsedCall)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello there.\n", "Hello there.\n", []),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
        (
            (
                'Let me look. <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n'
                '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>\n'
            ),
            "Let me look.",
            [PARIS, ROME],
        ),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_', "", [PARIS]),
        ('<tool_call>{"name": "get_weather"}</tool_call> ok', "ok", [ParsedCall("get_weather", "{}")]),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        (
            '<tool_call>{"name": "search", "arguments": {"q": "</tool_call>"}}</tool_call>',
            "",
            [ParsedCall("search", '{"q": "</tool_call>"}')],
        ),
        ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        (
            (
                '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
                '{"name": "get_weather", "parameters": {"city": "Rome"}}'
            ),
            "",
            [PARIS, ROME],
        ),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        (' {"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        (
            '{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}',
            "",
            [PARIS],
        ),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('{"city": "Paris", "sky": [1, 2]}', '{"city": "Paris", "sky": [1, 2]}', []),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ('[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
        (
            (
                '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
                '{"name": "get_weather", "arguments": {"city": "Rome"}}]'
            ),
            "",
            [PARIS, ROME],
        ),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [PARIS]),
        (
            '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_weather{"city": "Rome"}',
            "",
            [PARIS, ROME],
        ),
        ("[TOOL_CALLS] nothing here", "[TOOL_CALLS] nothing here", []),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', "", [PARIS]),
        (
            '{"name": "get_weather", "arguments": {"x": NaN}}',
            '{"name": "get_weather", "arguments": {"x": NaN}}',
            [],
        ),
        ("a < b and <tool", "a < b and <tool", []),
    ],
)
def test_reads_what_models_write(text, content, calls):
    assert parse_tool_calls(text, NAMES) == (content, calls)


def test_without_offered_tools_bare_json_is_an_answer():
    text = '{"name": "get_weather", "arguments": {}}'
    assert parse_tool_calls(text, ()) == (text, [])


def test_plain_text_is_not_held_back():
    parser = ToolCallParser(NAMES)
    assert parser.feed("The sky") == ["The sky"]
    assert parser.feed(" is <b>") == [" is <b>"]
    assert parser.feed("<tool") == []
    assert parser.feed("box>") == ["<toolbox>"]


def test_json_answer_streams_once_its_first_key_shows_it_is_one():
    parser = ToolCallParser(NAMES)
    assert parser.feed('{"ci') == []
    assert parser.feed('ty": ') == ['{"city":']


def test_deep_nesting_is_text():
    text = "<tool_call>" + "[" * 5000 + "]" * 5000 + "</tool_call>"
    assert parse_tool_calls(text, NAMES) == (text, [])


CALL_JSON = st.builds(
    lambda name, arguments, key: json.dumps({"name": name, key: arguments}),
    st.sampled_from(["get_weather", "search", "other"]),
    st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.none(), max_size=2),
    st.sampled_from(["arguments", "parameters"]),
)
FRAGMENT = st.one_of(
    CALL_JSON,
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "get_weather",
            "[ARGS]",
            "{",
            "}",
            "[",
            "]",
            " ",
            "\n",
            ";",
            ",",
            '"',
            "\\",
            '{"a": 1}',
            "{}",
            "x",
            "<",
            "</",
            '"name"',
            ":",
        ]
    ),
    st.text(max_size=3),
    CALL_JSON.map(lambda call: f"<tool_call>{call}</tool_call>"),
)


@given(st.lists(FRAGMENT, max_size=8).map("".join), st.data())
@example("[TOOL_CALLS]a b", None)
def test_any_split_gives_the_same_result(text, data):
    whole = parse_tool_calls(text, NAMES)
    if data is None:
        pieces = list(text)
    else:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser = ToolCallParser(NAMES)
    found = [item for piece in pieces for item in parser.feed(piece)] + parser.finish()
    content = "".join(item for item in found if isinstance(item, str))
    assert (content, [item for item in found if not isinstance(item, str)]) == whole


@given(st.lists(FRAGMENT, max_size=8).map("".join))
@example('{"name": "search"}<|python_tag|>{"name": "other", "arguments": {}}')
@example('<|python_tag|>{"name": "other"}[TOOL_CALLS]search{}')
def test_one_character_at_a_time_gives_the_same_result(text):
    parser = ToolCallParser(NAMES)
    found = [item for char in text for item in parser.feed(char)] + parser.finish()
    content = "".join(item for item in found if isinstance(item, str))
    assert (content, [item for item in found if not isinstance(item, str)]) == parse_tool_calls(text, NAMES)


@given(st.lists(FRAGMENT, max_size=8).map("".join))
def test_without_calls_no_character_is_lost(text):
    content, calls = parse_tool_calls(text, NAMES)
    if not calls:
        assert content == text
