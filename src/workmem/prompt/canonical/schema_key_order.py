"""The keys of tools and of their schemas in one order."""

from __future__ import annotations

from typing import Any

from workmem.prompt.canonical.key_order import ordered_tool
from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.canonical.tool_rewriting import rewriter
from workmem.prompt.dialects.places import Dialect

_NAME = "schema_key_order"
_rewrite = rewriter(ordered_tool)


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    del dialect
    paths = _rewrite(body)
    return Applied(_NAME, tuple(paths)) if paths else None


SCHEMA_KEY_ORDER = Rule(
    name=_NAME,
    kind="lossless",
    default=True,
    what=(
        "Writes the keys of tool definitions and of their JSON schemas, properties included, in one order at every "
        "depth, and the names in `required` as a sorted set. Values under `enum`, `const`, `default` and `examples` "
        "stay as they are, and so does the order of every list but `required`."
    ),
    why=(
        "JSON objects have no order, but their text has: an SDK that keeps them in a hash map, or a new version of a "
        "tool server, writes the same tools as other tokens."
    ),
    fix="Serialise tool definitions with sorted keys.",
    apply=_apply,
)
