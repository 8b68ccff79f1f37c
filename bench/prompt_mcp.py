"""Tool lists of real MCP servers: whether they always make the same prompt, and what a new version of a server costs."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from prompt_hits import Prompts, Request, hit_of_second
from prompt_traps import body_of, continued, keys_shuffled

from workmem.prompt.canonical.rules import DEFAULT_RULES
from workmem.prompt.dialects.places import Dialect

SHUFFLES = 20
_SUFFIX = ".tools_list.raw.json"


def lists_in(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By server and version: its tools, as clients of OpenAI's API send them on. `folder` has answers to `tools/list`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        tools = json.loads(path.read_text())["tools"]
        found[path.name.removesuffix(_SUFFIX)] = [_as_function(tool) for tool in tools]
    return found


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": function | {"parameters": tool["inputSchema"]}}


def stable_lists(
    prompts: Prompts, lists: Mapping[str, list[dict[str, Any]]], dialect: Dialect, seed: int
) -> list[dict[str, Any]]:
    """Of each list: how many prompts its shuffled forms make, and the hit of one after another."""
    rows: list[dict[str, Any]] = []
    for name, tools in lists.items():
        chance = random.Random(seed)
        forms = [_body(seed, _shuffled(tools, chance)) for _ in range(SHUFFLES)]
        before = Request(dialect, _body(seed, tools))
        after = Request(dialect, continued(_body(seed, _shuffled(tools, chance))))
        rows.append(
            {
                "list": name,
                "tools": len(tools),
                "tokens": prompts.count(json.dumps(tools)),
                "prompts_raw": len({tuple(prompts.ids(Request(dialect, body))) for body in forms}),
                "prompts_canonical": len(
                    {tuple(prompts.ids(Request(dialect, body), DEFAULT_RULES)) for body in forms}
                ),
                "key_order_only": {
                    "control": hit_of_second(
                        prompts, before, Request(dialect, continued(before.body)), DEFAULT_RULES
                    ),
                    "raw": hit_of_second(prompts, before, after),
                    "canonical": hit_of_second(prompts, before, after, DEFAULT_RULES),
                },
            }
        )
    return rows


def upgrades(
    prompts: Prompts, lists: Mapping[str, list[dict[str, Any]]], dialect: Dialect, seed: int
) -> list[dict[str, Any]]:
    """Each server's next version in the middle of a conversation."""
    versions: dict[str, list[str]] = defaultdict(list)
    for name in lists:
        versions[name.rsplit("-", 1)[0]].append(name)
    rows: list[dict[str, Any]] = []
    for names in versions.values():
        in_order = sorted(names, key=lambda name: [int(part) for part in name.rsplit("-", 1)[1].split(".")])
        for old, new in pairwise(in_order):
            before = Request(dialect, _body(seed, lists[old]))
            after = Request(dialect, continued(_body(seed, lists[new])))
            rows.append(
                {
                    "from": old,
                    "to": new,
                    "raw": hit_of_second(prompts, before, after),
                    "canonical": hit_of_second(prompts, before, after, DEFAULT_RULES),
                }
            )
    return rows


def _body(seed: int, tools: list[dict[str, Any]]) -> dict[str, Any]:
    return body_of(seed) | {"tools": tools}


def _shuffled(tools: list[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    mixed = [keys_shuffled(tool, chance) for tool in tools]
    chance.shuffle(mixed)
    return mixed
