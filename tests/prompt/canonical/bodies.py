"""Request bodies of all three APIs, made up by hypothesis: odd ones too."""

import random

from hypothesis import strategies as st

from workmem.prompt.canonical.schema_keywords import VALUES
from workmem.prompt.dialects.chat import CHAT
from workmem.prompt.dialects.messages import MESSAGES
from workmem.prompt.dialects.responses import RESPONSES

NAMES = ("read", "write", "list_files", "a", "b", "enum", "required", "type")
words = st.sampled_from(
    ("", "x", "Read a file.", "- one\n- two", "x-anthropic-billing-header: cch=1;\nHi", "é")
)
scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2).map(lambda x: round(x, 1)) | words
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)


def _schema_of(inner):
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(("object", "string", ["string", "null"])),
            "$schema": st.sampled_from(
                ("http://json-schema.org/draft-07/schema#", "https://example.org/own")
            ),
            "description": words,
            "properties": named,
            "$defs": named,
            "required": st.lists(st.sampled_from(NAMES), max_size=3),
            "enum": st.lists(values, max_size=3),
            "default": values,
            "const": values,
            "minimum": st.sampled_from((0, 1.0, 2.5, -0.0)),
            "oneOf": st.lists(inner, max_size=2),
            "prefixItems": st.lists(inner, max_size=2),
            "items": inner,
            "dependentRequired": st.dictionaries(
                st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), max_size=2), max_size=2
            ),
            "x-odd": values,
        },
    )


schemas = st.recursive(st.booleans() | st.just({}), _schema_of, max_leaves=6).filter(
    lambda one: isinstance(one, dict)
)


def _function(schema_key):
    return st.fixed_dictionaries(
        {"name": st.sampled_from(NAMES)},
        optional={"description": words | st.none(), schema_key: schemas, "strict": st.booleans()},
    )


_sound_tools = {
    "chat": _function("parameters").map(lambda one: {"type": "function", "function": one}),
    "responses": _function("parameters").map(lambda one: {"type": "function", **one}),
    "messages": st.fixed_dictionaries(
        {"name": st.sampled_from(NAMES), "input_schema": schemas},
        optional={"description": words, "cache_control": st.just({"type": "ephemeral", "ttl": "1h"})},
    ),
}
_odd_tools = (
    st.just({"type": "web_search", "filters": {"b": 1, "a": [2, 1]}})
    | scalars
    | st.dictionaries(st.sampled_from(NAMES), values, max_size=3)
)

texts = st.lists(words.map(lambda text: {"type": "text", "text": text}), max_size=3)
contents = words | texts | st.none()
arguments = st.sampled_from(('{"path": "."}', '{"path":"."}', "{}", "", "broken {", '{"a":1.0,"b":[1, 2]}'))
ids = st.sampled_from(("call_1", "call_2", "toolu_x"))

_chat_message = st.fixed_dictionaries(
    {"role": st.sampled_from(("system", "developer", "user", "assistant", "tool")), "content": contents},
    optional={
        "id": ids,
        "timestamp": st.integers(1, 9),
        "name": st.sampled_from(NAMES),
        "tool_call_id": ids,
        "reasoning_content": words,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {
                    "id": ids,
                    "type": st.just("function"),
                    "function": st.fixed_dictionaries(
                        {"name": st.sampled_from(NAMES), "arguments": arguments}
                    ),
                }
            ),
            max_size=2,
        ),
    },
)
_block = (
    words.map(lambda text: {"type": "text", "text": text})
    | words.map(lambda text: {"type": "thinking", "thinking": text, "signature": "s"})
    | st.fixed_dictionaries(
        {"type": st.just("tool_use"), "id": ids, "name": st.sampled_from(NAMES), "input": values}
    )
    | st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": ids, "content": contents})
    | st.just({"type": "image", "source": {"type": "url", "url": "u"}})
)
_message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("user", "assistant", "system")),
        "content": words | st.lists(_block, max_size=3),
    }
)
_item = (
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "assistant", "developer")), "content": contents},
        optional={"type": st.just("message"), "id": ids},
    )
    | st.fixed_dictionaries(
        {
            "type": st.just("function_call"),
            "call_id": ids,
            "name": st.sampled_from(NAMES),
            "arguments": arguments,
        }
    )
    | st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": ids, "output": words})
    | st.fixed_dictionaries({"type": st.just("reasoning"), "id": ids, "summary": texts})
)


def _body(dialect, history, **more):
    tools = st.lists(_sound_tools[dialect.name], max_size=4) | st.lists(
        _sound_tools[dialect.name] | _odd_tools, max_size=4
    )
    return st.fixed_dictionaries(
        {dialect.history_key: history},
        optional={"tools": tools, "model": st.just("m"), "x_unknown": values, **more},
    )


BODIES = {
    CHAT: _body(CHAT, st.lists(_chat_message, max_size=4)),
    MESSAGES: _body(MESSAGES, st.lists(_message, max_size=4), system=words | texts),
    RESPONSES: _body(RESPONSES, words | st.lists(_item, max_size=4), instructions=words),
}
asked = st.sampled_from(list(BODIES)).flatmap(lambda one: st.tuples(st.just(one), BODIES[one]))
"""(dialect, body)."""


def shuffled(value, seed):
    """The same JSON with the keys of its objects in another order, but for values that a schema names."""
    chance = random.Random(seed)

    def walk(one):
        if isinstance(one, dict):
            keys = list(one)
            chance.shuffle(keys)
            return {key: one[key] if key in VALUES else walk(one[key]) for key in keys}
        return [walk(item) for item in one] if isinstance(one, list) else one

    return walk(value)
