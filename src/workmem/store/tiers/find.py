"""From the name in `[store.below]` to the tier that somebody installed under it."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import cast

from workmem.core.errors import ConfigError
from workmem.store.tiers.contract import ENTRY_POINTS, Options, Tier, TierFactory

BUILT_IN = "ssd"
_OURS = (EntryPoint("mooncake", "workmem.store.tiers.mooncake.tier:mooncake_tier", ENTRY_POINTS),)
"""Come with us and need more than we do: loaded when they are asked for."""


def find_tier(name: str, options: Options) -> Tier:
    """The installed tier `name`, not yet open. Raises ConfigError where there is none, or it does not load."""
    found = {point.name: point for point in (*_OURS, *entry_points(group=ENTRY_POINTS))}
    if name not in found:
        known = ", ".join(sorted({BUILT_IN, *found}))
        raise ConfigError(
            f"$.store.below.tier: {name!r} is not installed; there are: {known}. "
            f"A package adds one with an entry point in the group {ENTRY_POINTS}"
        )
    try:
        factory = cast("TierFactory", found[name].load())
        return factory(options)
    except ConfigError:
        raise
    except Exception as error:  # plugin boundary: importing and calling code of others
        raise ConfigError(f"$.store.below.tier: {name!r} does not load: {error!r}") from error
