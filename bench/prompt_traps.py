"""Pairs of requests that ought to share a prefix, each with one thing that keeps them from it, and a pair that is healthy.

All of them are made here: the instructions are the airline policy of the demo (its ORIGIN.md has where it is from), the
tools and the conversation were written for this.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

Body = dict[str, Any]
CONTROL = "healthy append"
_CALL_ID = "call_b26c41f09a7d"
_TEXT = {"type": "string", "description": "As the user wrote it, in full, without quotes."}
_DATE = {"type": "string", "description": "A day as YYYY-MM-DD."}
_THING = "reservation"


class Trap(NamedTuple):
    """An earlier request, a later one, and what is to be said of the later one."""

    name: str
    before: Body
    after: Body
    cause: str
    """What has to be named first; empty where nothing may be named."""
    path: str
    """Where."""
    is_lossless: bool
    """Whether both mean the same JSON, so that a canonical form has to bring back what was lost."""


def traps(seed: int) -> list[Trap]:
    """All of them; the control comes first."""
    base = body_of(seed)
    found = [Trap(CONTROL, base, continued(base), "", "", is_lossless=True)]
    for name, cause, path, is_lossless, change in _KINDS:
        before = copy.deepcopy(base)
        after = continued(base)
        change(before, after, random.Random(seed))
        found.append(Trap(name, before, after, cause, path, is_lossless=is_lossless))
    return found


def body_of(seed: int, *, tools: int = 10, about: str = "") -> Body:
    """A chat some turns in: instructions, tools, one call and its result."""
    messages = [
        {"role": "system", "content": about + _policy()},
        {"role": "user", "content": "I am mia_li_3668. Please move my flight of 20 May to the day after."},
        {
            "role": "assistant",
            "content": "Let me look at your reservations first.",
            "reasoning_content": "The user id is given, so look the user up before anything else.",
            "tool_calls": [
                {
                    "id": _CALL_ID,
                    "type": "function",
                    "function": {
                        "name": "list_reservations",
                        "arguments": '{"user_id": "mia_li_3668", "with_segments": true}',
                    },
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": _CALL_ID,
            "content": '{"reservations": ["4WQ150", "NO6JO3"], "membership": "gold"}',
        },
        {
            "role": "assistant",
            "content": "You hold two reservations, 4WQ150 and NO6JO3. Which of them do you mean?",
        },
        {"role": "user", "content": "The one to Seattle, I believe that is NO6JO3."},
    ]
    return {
        "model": "model",
        "messages": messages,
        "tools": tools_of(tools, seed),
        "max_tokens": 64,
        "temperature": 0,
    }


def continued(body: Body) -> Body:
    """The same conversation a turn later."""
    after = copy.deepcopy(body)
    after["messages"] += [
        {"role": "assistant", "content": "NO6JO3 can be moved to 21 May for 35 dollars. Shall I?"},
        {"role": "user", "content": "Yes, please do that, and pay with the card that ends in 7447."},
    ]
    return after


def tools_of(count: int, seed: int) -> list[dict[str, Any]]:
    """Tools by name; sizes and shapes vary with the seed."""
    chance = random.Random(seed)
    verbs = ("add", "book", "cancel", "check", "hold", "list", "move", "price", "refund", "split", "upgrade")
    things = (f"{_THING}s", "baggage", "certificate", "passenger", "seat", "segment", "voucher", "waiver")
    names = sorted({f"{verb}_{thing}" for thing in things for verb in verbs} - {"list_reservations"})
    chosen = sorted([*chance.sample(names, min(count, len(names)) - 1), "list_reservations"])
    return [_tool(name, chance) for name in chosen]


def _tool(name: str, chance: random.Random) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "user_id": _TEXT,
        "reservation_id": {"type": "string", "pattern": "^[A-Z0-9]{6}$", "description": "Six characters."},
        "cabin": {"type": "string", "enum": ["basic_economy", "economy", "business"]},
        "dates": {
            "type": "object",
            "properties": {"from": _DATE, "until": _DATE, "is_flexible": {"type": "boolean"}},
            "required": ["from", "until"],
            "additionalProperties": False,
        },
        "passengers": {
            "type": "array",
            "minItems": 1,
            "maxItems": 5,
            "items": {
                "type": "object",
                "properties": {"first_name": _TEXT, "last_name": _TEXT, "born": _DATE},
                "required": ["first_name", "last_name", "born"],
            },
        },
        "payment_id": {"type": "string", "description": "An id that the user's profile has."},
        "with_segments": {"type": "boolean", "default": False},
    }
    kept = ["user_id", *chance.sample([key for key in properties if key != "user_id"], 4)]
    what = name.replace("_", " ")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use this to {what}, once the user has agreed to it. Says what has changed and what it costs.",
            "parameters": {
                "type": "object",
                "properties": {key: copy.deepcopy(properties[key]) for key in kept},
                "required": kept[:3],
            },
        },
    }


def keys_shuffled(value: Any, chance: random.Random) -> Any:
    """The same JSON, with the keys of every object in another order."""
    if isinstance(value, dict):
        keys = list(value)
        chance.shuffle(keys)
        return {key: keys_shuffled(value[key], chance) for key in keys}
    return [keys_shuffled(item, chance) for item in value] if isinstance(value, list) else value


def _policy() -> str:
    from workmem.demo.runs import airline_runs  # noqa: PLC0415 - only the controller has it

    policy = str(airline_runs()[0].messages[0]["content"])
    # It has a clock of its own, which traps bring.
    return policy.replace("The current time is 2024-05-15 15:00:00 EST.\n\n", "")


def _prefixed(before: Body, after: Body, was: str, now: str) -> None:
    for body, line in ((before, was), (after, now)):
        body["messages"][0]["content"] = line + body["messages"][0]["content"]


def _billing(before: Body, after: Body, chance: random.Random) -> None:
    lines = [
        f"x-anthropic-billing-header: cc_version=2.1.332.{chance.randrange(4096):03x}; cc_entrypoint=cli; "
        f"cch={chance.randrange(1 << 20):05x};\n"
        for _ in range(2)
    ]
    _prefixed(before, after, *lines)


def _tool_order(before: Body, after: Body, chance: random.Random) -> None:
    del before, chance
    after["tools"] = [*after["tools"][1:], after["tools"][0]]


def _key_order(before: Body, after: Body, chance: random.Random) -> None:
    del before
    for tool in after["tools"]:
        schema = tool["function"]["parameters"]
        tool["function"]["parameters"] = {
            **dict(reversed(list(schema.items()))),
            "properties": keys_shuffled(schema["properties"], chance),
        }


def _tool_added(before: Body, after: Body, chance: random.Random) -> None:
    del before
    after["tools"].insert(0, _tool("aaa_new_tool", chance))


def _iso_time(before: Body, after: Body, chance: random.Random) -> None:
    del chance
    _prefixed(before, after, "The time is 2026-11-29T10:15:03Z.\n\n", "The time is 2026-11-29T10:16:04Z.\n\n")


def _long_date(before: Body, after: Body, chance: random.Random) -> None:
    del chance
    _prefixed(
        before, after, "Today is Sunday, November 29, 2026.\n\n", "Today is Monday, November 30, 2026.\n\n"
    )


def _arguments(before: Body, after: Body, chance: random.Random) -> None:
    del before, chance
    call = after["messages"][2]["tool_calls"][0]["function"]
    call["arguments"] = json.dumps(json.loads(call["arguments"]), separators=(",", ":"))


def _call_id(before: Body, after: Body, chance: random.Random) -> None:
    del before, chance
    renamed = _CALL_ID.replace("_", "")
    after["messages"][2]["tool_calls"][0]["id"] = renamed
    after["messages"][3]["tool_call_id"] = renamed


def _no_reasoning(before: Body, after: Body, chance: random.Random) -> None:
    del before, chance
    del after["messages"][2]["reasoning_content"]


def _trimmed(before: Body, after: Body, chance: random.Random) -> None:
    del before, chance
    del after["messages"][1:4]


def _space(before: Body, after: Body, chance: random.Random) -> None:
    del before, chance
    text = after["messages"][0]["content"]
    place = text.index(" ", len(text) // 2)
    after["messages"][0]["content"] = f"{text[:place]} {text[place:]}"


def _uuid(before: Body, after: Body, chance: random.Random) -> None:
    lines = [
        f"Run {chance.randrange(1 << 32):08x}-93c1-4f0a-8b7e-{chance.randrange(1 << 48):012x}.\n\n"
        for _ in range(2)
    ]
    _prefixed(before, after, *lines)


def _required(before: Body, after: Body, chance: random.Random) -> None:
    del before, chance
    after["tools"][0]["function"]["parameters"]["required"].reverse()


_Change = Callable[[Body, Body, random.Random], None]
_KINDS: tuple[tuple[str, str, str, bool, _Change], ...] = (
    ("billing line in front", "billing_header", "messages[0].content", True, _billing),
    ("tools in another order", "tool_order", "tools[0]", True, _tool_order),
    (
        "keys of schemas in another order",
        "schema_key_order",
        "tools[0].function.parameters",
        True,
        _key_order,
    ),
    ("a new tool in front", "tool_added", "tools[0]", False, _tool_added),
    ("a clock in line one", "volatile_time", "messages[0].content", False, _iso_time),
    ("a date in line one", "volatile_date", "messages[0].content", False, _long_date),
    (
        "arguments of a call written another way",
        "arguments_reserialised",
        "messages[2].tool_calls[0].function.arguments",
        True,
        _arguments,
    ),
    ("another id of a call", "call_id_changed", "messages[2].tool_calls[0].id", True, _call_id),
    (
        "thinking not sent back",
        "reasoning_dropped",
        "messages[2]",
        False,
        _no_reasoning,
    ),
    ("history trimmed", "history_trimmed", "messages[1]", False, _trimmed),
    ("one space more", "whitespace", "messages[0].content", False, _space),
    ("a uuid in line one", "volatile_id", "messages[0].content", False, _uuid),
    (
        "`required` in another order",
        "required_order",
        "tools[0].function.parameters.required",
        True,
        _required,
    ),
)
