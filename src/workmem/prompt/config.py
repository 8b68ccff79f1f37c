"""Settings of what is done to a prompt before it is rendered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from workmem.core.errors import ConfigError
from workmem.prompt.canonical.rules import RULE_NAMES

Canonical = Literal["lossless", "off"]


class TenantPromptConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[prompt.tenants.NAME]`: what one tenant has otherwise."""

    canonical: Canonical | None = None
    rules: dict[str, bool] = {}


class PromptConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[prompt]` of the configuration."""

    canonical: Canonical = "lossless"
    """lossless: prompts that mean the same get one form, by the rules that are on. off: no token is changed, whatever `rules` say."""
    rules: dict[str, bool] = {}
    """Rules to put on (true) or off (false), by name, as `workmem rules` lists them. From a file only."""
    tenants: dict[str, TenantPromptConfig] = {}
    """By tenant: its own `canonical`, and `rules` over those above. From a file only."""

    def __post_init__(self) -> None:
        _check_names(self.rules, "$.prompt.rules")
        for name, tenant in self.tenants.items():
            _check_names(tenant.rules, f"$.prompt.tenants.{name}.rules")


def _check_names(rules: Mapping[str, bool], path: str) -> None:
    for name in rules:
        if name not in RULE_NAMES:
            raise ConfigError(f"{path}: no rule is named {name!r}; there are {', '.join(RULE_NAMES)}")
