"""Which rules a request gets: those of the configuration, of its tenant, and what it says itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workmem.core.errors import ClientError
from workmem.prompt.canonical.rules import chosen_rules
from workmem.prompt.config import PromptConfig

_NONE: frozenset[str] = frozenset()


class RuleChoice:
    """The rules by tenant, worked out once."""

    def __init__(self, config: PromptConfig) -> None:
        everyone = chosen_rules(config.rules)
        self._rules = everyone
        self._is_on = config.canonical != "off"
        self._tenants = {
            name: (
                chosen_rules(tenant.rules, base=everyone),
                (tenant.canonical or config.canonical) != "off",
            )
            for name, tenant in config.tenants.items()
        }

    def of(self, tenant: str, body: Mapping[str, Any]) -> frozenset[str]:
        """Rules of a request. It may say `"workmem": {"canonical": "off"}`, or `"lossless"`, for itself.

        Raises ClientError where it says anything else.
        """
        rules, _ = self._tenants.get(tenant, (self._rules, self._is_on))
        return rules if self.is_on(tenant, body) else _NONE

    def is_on(self, tenant: str, body: Mapping[str, Any]) -> bool:
        """Whether a request's tokens may be others than those of its own words. Raises as `of` does."""
        _, is_on = self._tenants.get(tenant, (self._rules, self._is_on))
        extension = body.get("workmem")
        said = extension.get("canonical") if isinstance(extension, dict) else None
        if said is None:
            return is_on
        if said not in ("lossless", "off"):
            raise ClientError(
                f"workmem.canonical is 'lossless' or 'off', got {said!r}.", param="workmem.canonical"
            )
        return said == "lossless"
