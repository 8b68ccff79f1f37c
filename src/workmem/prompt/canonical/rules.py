"""All rules, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Mapping

from workmem.core.errors import ConfigError
from workmem.prompt.canonical.argument_form import ARGUMENT_FORM
from workmem.prompt.canonical.attribution_header import ATTRIBUTION_HEADER
from workmem.prompt.canonical.call_ids import CALL_IDS
from workmem.prompt.canonical.date_rounding import DATE_ROUNDING
from workmem.prompt.canonical.description_line_order import DESCRIPTION_LINE_ORDER
from workmem.prompt.canonical.message_fields import MESSAGE_FIELDS
from workmem.prompt.canonical.message_key_order import MESSAGE_KEY_ORDER
from workmem.prompt.canonical.rule import Rule
from workmem.prompt.canonical.schema_form import SCHEMA_FORM
from workmem.prompt.canonical.schema_key_order import SCHEMA_KEY_ORDER
from workmem.prompt.canonical.tool_order import TOOL_ORDER
from workmem.prompt.canonical.unordered_context import UNORDERED_CONTEXT
from workmem.prompt.canonical.volatile_to_tail import VOLATILE_TO_TAIL

RULES: tuple[Rule, ...] = (
    ATTRIBUTION_HEADER,
    SCHEMA_FORM,
    TOOL_ORDER,
    SCHEMA_KEY_ORDER,
    MESSAGE_FIELDS,
    MESSAGE_KEY_ORDER,
    CALL_IDS,
    ARGUMENT_FORM,
    DESCRIPTION_LINE_ORDER,
    UNORDERED_CONTEXT,
    DATE_ROUNDING,
    VOLATILE_TO_TAIL,
)
"""The header goes before anything looks for what changes in the instructions, and a clock is rounded before it is moved."""

RULE_NAMES = tuple(rule.name for rule in RULES)
DEFAULT_RULES = frozenset(rule.name for rule in RULES if rule.default)


def rule_named(name: str) -> Rule | None:
    """The rule of that name."""
    return next((rule for rule in RULES if rule.name == name), None)


def chosen_rules(changes: Mapping[str, bool], *, base: frozenset[str] = DEFAULT_RULES) -> frozenset[str]:
    """`base` with rules put in (true) and left out (false). Raises ConfigError where there is no such rule."""
    for name in changes:
        if name not in RULE_NAMES:
            raise ConfigError(f"no rule is named {name!r}; there are {', '.join(RULE_NAMES)}")
    return (base | {name for name, on in changes.items() if on}) - {
        name for name, on in changes.items() if not on
    }
