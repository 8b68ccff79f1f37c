"""Opening what lies below dram: the ssd tier, one that somebody installed, or nothing."""

from __future__ import annotations

from workmem.core.errors import ConfigError
from workmem.core.events import EventSink
from workmem.core.outcomes import TierName
from workmem.core.units import parse_bytes
from workmem.store.codecs.contract import Codec
from workmem.store.codecs.sealing import Keyring
from workmem.store.config import StoreConfig
from workmem.store.device import BlockDevice
from workmem.store.pool import Pool
from workmem.store.ssd_index import SsdIndex
from workmem.store.steering import QuotaDesk, set_quotas
from workmem.store.tiers.attached import AttachedTier
from workmem.store.tiers.find import BUILT_IN, find_tier
from workmem.store.tiers.folder import Identity, StoreFolder
from workmem.store.tiers.free_space import parse_keep_free
from workmem.store.tiers.page_forms import PageForms
from workmem.store.tiers.ssd import SsdTier, promised_bytes


class TierOpening:
    """How the tier below dram is opened, at a start and whenever it has to be opened anew.

    Raises ConfigError on settings that can never work.
    """

    def __init__(
        self,
        config: StoreConfig,
        pool: Pool,
        device: BlockDevice,
        sink: EventSink,
        *,
        codec: Codec,
        keyring: Keyring | None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._device = device
        self._sink = sink
        self._keyring = keyring
        self.is_ssd = config.below.tier == BUILT_IN
        self.is_wanted = not self.is_ssd or config.ssd.enabled
        """Something is to lie below dram."""
        self.index: SsdIndex | None = None
        """Of whichever tier is open; None until one is whose size is not known before."""
        if self.is_ssd and config.below.options:
            raise ConfigError("$.store.below.options: are for an installed tier; ssd is set by store.ssd")
        if not (self.is_ssd and config.ssd.enabled):
            _refuse_quotas(config)
            return
        self.forms = PageForms(codec, keyring)
        self._keep_free = parse_keep_free(config.ssd.keep_free, "$.store.ssd.keep_free")
        self.capacity_bytes = parse_bytes(config.ssd.bytes, "$.store.ssd.bytes")
        self.promised_bytes = promised_bytes(self.capacity_bytes)
        self.index = SsdIndex(pool.state, self.capacity_bytes, config.ssd.eviction)
        set_quotas(QuotaDesk(pool.state, self.index, self.promised_bytes), config.quotas, TierName.SSD)

    def open(self) -> SsdTier | AttachedTier:
        """At a start: what it holds is in the index on return. Raises OSError where the medium fails."""
        if not self.is_ssd:
            tier = self.attach()
            tier.restore()
            return tier
        ssd = self.open_ssd()
        try:
            ssd.open()
        except BaseException:
            ssd.index.let_go()
            ssd.close()
            raise
        return ssd

    def open_ssd(self, identity: Identity | None = None) -> SsdTier:
        """The ssd tier, its folder locked, nothing read yet. Raises ConfigError where the folder is not to be taken."""
        config = self._config.ssd
        folder = StoreFolder(config.path, self._keyring, identity=identity)
        try:
            tier = SsdTier(
                folder,
                self._pool,
                self._device,
                self._sink,
                self.capacity_bytes,
                self._keep_free,
                config.eviction,
                self.forms,
                self.index,
            )
        except BaseException:
            folder.close()
            raise
        if config.io == "buffered":
            tier.use_buffered()
        return tier

    def attach(self) -> AttachedTier:
        """The installed tier, made and open, what it holds not taken over yet. Raises OSError where it fails."""
        found = find_tier(self._config.below.tier, self._config.below.options)
        self._pool.state.below = found.kind
        tier = AttachedTier(found, self._pool, self._config.ssd.eviction, self.index)
        self.index = tier.index
        return tier


def _refuse_quotas(config: StoreConfig) -> None:
    """Raises ConfigError on quotas of an ssd tier that is not there: nobody would keep them."""
    if config.below.tier == BUILT_IN:
        why = "store.ssd.enabled is false; enable it"
    else:
        why = f"store.below.tier is {config.below.tier!r}, which has no quotas; name ssd there"
    for group, quota in config.quotas.items():
        path = f'$.store.quotas."{group}"'
        for field, value, is_set in (
            ("ssd_floor", quota.ssd_floor, parse_bytes(quota.ssd_floor, f"{path}.ssd_floor") > 0),
            ("ssd_ceiling", quota.ssd_ceiling, quota.ssd_ceiling != ""),
        ):
            if is_set:
                raise ConfigError(f"{path}.{field}: {value!r} is for the ssd tier, and {why}, or take it out")
