"""Settings of the store. Sizes take units ("2GiB"); defaults suit a laptop."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from workmem.policy.choose import EvictionName
from workmem.store.host.config import HostConfig


class DramConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[store.dram]`: the arena that every page passes through."""

    bytes: str | int = "2GiB"
    """Size of the arena. Memory is taken as it is used and 256 MiB ahead, never given up before the end."""
    path: str = ""
    """File that backs the arena (persistent or CXL memory as a DAX file, tmpfs); empty is plain memory."""
    eviction: EvictionName = "value"
    """Which page leaves first. Value: the one worth least, by odds of reuse and cost to recompute. Segmented LRU: never reused, then the oldest. S3-FIFO: unproven, then unused. LRU: the oldest."""


class SsdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[store.ssd]`: pages that outlive the process."""

    enabled: bool = True
    """Without it nothing outlives the process."""
    path: str = ""
    """Folder, owned by one process at a time; empty takes `store` in the cache folder (`$XDG_CACHE_HOME/workmem`, by default `~/.cache/workmem`)."""
    bytes: str | int = "8GiB"
    """Most bytes of segment files; the journal comes on top (about 100 bytes a page)."""
    eviction: EvictionName = "value"
    """Which page leaves first, as in `[store.dram]`."""
    keep_free: str | int = "5%"
    """Share of the filesystem, or bytes, that stays free for others: the tier gives way before they run out."""
    io: Literal["direct", "buffered"] = "direct"
    """Direct bypasses the page cache; where a filesystem refuses, buffered is used and said."""
    readers: Annotated[int, Meta(ge=1, le=16)] = 3
    """Threads that bring pages to dram."""
    retry_s: Annotated[float, Meta(gt=0)] = 30.0
    """Pause before a tier that tripped is tried again."""
    compression: Literal["off", "zstd", "int8", "fp8"] = "off"
    """How pages are kept: `zstd` makes them about a third smaller and costs time; `int8` and `fp8` halve them, rounded."""
    approximate: bool = False
    """Allow `int8` and `fp8`. What they keep is never a hit for a store that keeps exact pages."""
    key_file: str = ""
    """File of the key that pages and journal are encrypted under; empty leaves them in the clear."""
    older_key_files: tuple[str, ...] = ()
    """Keys of before, which open what was encrypted under them."""
    scrub_bytes_per_s: str | int = "4MiB"
    """Rate at which pages are read in the background to find rot before somebody needs them; 0 is never."""


class BelowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[store.below]`: what lies below dram."""

    tier: str = "ssd"
    """`ssd`, set by `[store.ssd]`, or the name of an installed tier (entry point group `workmem.tiers`)."""
    options: dict[str, str | int | float | bool] = {}
    """What that tier is to know; not for `ssd`."""


class PinsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[store.pins]`: blocks that callers ask to keep for a while."""

    budget: str | int = "25%"
    """Share of dram, or bytes, that the pins of one owner may name together; past it its oldest pins end."""


class QuotaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[store.quotas."tenant"]` or `[store.quotas."tenant/workflow"]`: what a group may count on, and may not exceed."""

    dram_floor: str | int = 0
    """Bytes of dram that no other group takes."""
    dram_ceiling: str | int = ""
    """Most bytes in dram; empty is no limit."""
    ssd_floor: str | int = 0
    """Bytes on ssd that no other group takes."""
    ssd_ceiling: str | int = ""
    """Most bytes on ssd; empty is no limit."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[store]` of the configuration."""

    dram: DramConfig = DramConfig()
    below: BelowConfig = BelowConfig()
    ssd: SsdConfig = SsdConfig()
    host: HostConfig = HostConfig()
    pins: PinsConfig = PinsConfig()
    quotas: dict[str, QuotaConfig] = {}
    """By tenant, or "tenant/workflow": `dram_floor`, `dram_ceiling`, `ssd_floor`, `ssd_ceiling`, sizes with units. From a file only."""
    save_queue_pages: Annotated[int, Meta(ge=1)] = 8192
    """Most pages waiting to be copied into dram; more are dropped, counted and said."""
