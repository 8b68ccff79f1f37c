"""Opening what lies below dram: the ssd tier, one that somebody installed, or nothing."""

from __future__ import annotations

from workmem.core.errors import ConfigError
from workmem.core.events import EventSink, TierStateChanged
from workmem.core.outcomes import TierName
from workmem.core.units import parse_bytes
from workmem.store.codecs.contract import Codec
from workmem.store.codecs.sealing import Keyring
from workmem.store.config import StoreConfig
from workmem.store.device import BlockDevice
from workmem.store.pool import Pool
from workmem.store.steering import QuotaDesk, set_quotas
from workmem.store.tiers.attached import AttachedTier
from workmem.store.tiers.find import BUILT_IN, find_tier
from workmem.store.tiers.folder import StoreFolder
from workmem.store.tiers.free_space import parse_keep_free
from workmem.store.tiers.page_forms import PageForms
from workmem.store.tiers.ssd import SsdTier


def open_below(
    config: StoreConfig,
    pool: Pool,
    device: BlockDevice,
    sink: EventSink,
    *,
    codec: Codec,
    keyring: Keyring | None,
) -> tuple[SsdTier | AttachedTier | None, str]:
    """The tier below dram, and why there is none although one was configured (empty otherwise).

    Raises ConfigError on settings that can never work.
    """
    tier: SsdTier | AttachedTier
    try:
        if config.below.tier != BUILT_IN:
            found = find_tier(config.below.tier, config.below.options)
            pool.state.below = found.kind
            tier = AttachedTier(found, pool, config.ssd.eviction)
        elif config.below.options:
            raise ConfigError("$.store.below.options: are for an installed tier; ssd is set by store.ssd")
        elif not config.ssd.enabled:
            return None, ""
        else:
            tier = _open_ssd(config, pool, device, sink, PageForms(codec, keyring), keyring)
    except OSError as error:
        # The medium, not the setting: what can be served without it is served.
        problem = f"cannot be opened ({error}); dram serves alone until the next start"
        sink(TierStateChanged(tier=pool.state.below, state="error", reason=problem))
        return None, problem
    return tier, ""


def _open_ssd(
    config: StoreConfig,
    pool: Pool,
    device: BlockDevice,
    sink: EventSink,
    forms: PageForms,
    keyring: Keyring | None,
) -> SsdTier:
    capacity_bytes = parse_bytes(config.ssd.bytes, "$.store.ssd.bytes")
    keep_free = parse_keep_free(config.ssd.keep_free, "$.store.ssd.keep_free")
    folder = StoreFolder(config.ssd.path, keyring)
    try:
        tier = SsdTier(folder, pool, device, sink, capacity_bytes, keep_free, config.ssd.eviction, forms)
        if config.ssd.io == "buffered":
            tier.use_buffered()
        set_quotas(
            QuotaDesk(pool.state, tier.index, tier.writes.extent_bytes_max), config.quotas, TierName.SSD
        )
        tier.open()
    except BaseException:
        folder.close()
        raise
    return tier
