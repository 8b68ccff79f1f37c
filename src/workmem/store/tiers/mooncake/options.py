"""`[store.below.options]` of the tier `mooncake`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from workmem.core.errors import ConfigError
from workmem.core.units import format_bytes, parse_bytes
from workmem.store.tiers.contract import Options

CAPACITY_MIN = 2**20
"""Of less, what stores keep themselves below is no room for a page, or none at all: no bound."""
_PATH = "$.store.below.options"
KEY_FILE = f"{_PATH}.key_file"


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pool, and what this process gives to it. Sizes take units ("4GiB")."""

    master: Annotated[str, Meta(min_length=3)]
    """`host:port` of the master, or `etcd://host:port` of a highly available one."""
    pool: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "default"
    """Stores that name the same pool share pages."""
    segment: str | int = 0
    """Memory that this process gives to the pool; 0 for one that only uses it."""
    capacity: str | int = 0
    """Bytes that all stores of the pool may fill; 0 takes `segment`. The store keeps itself below 0.65 of it."""
    host: str = "127.0.0.1"
    """Address of this host, as the others reach it."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How bytes travel."""
    devices: str = ""
    """Network devices for rdma, separated by commas."""
    object_bytes: str | int = "2MiB"
    """Blocks of one context that are put together are one object, up to this size."""
    key_file: str = ""
    """File of the key that all that this store puts into the pool is encrypted under. Only stores with the same key share pages; empty is in the clear."""
    preferred_segment: str = ""
    """Segment that takes what this store puts, where it has room, as `workmem cluster status` names it; empty prefers this process's own."""
    tenant: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "default"
    """Tenant of Mooncake's that this store's objects count for, where the master bounds tenants. Tenants share no page."""
    poll_s: Annotated[float, Meta(gt=0, le=60)] = 0.25
    """Pause between looks at what other stores put."""


def parse_options(options: Options) -> MooncakeOptions:
    """Raises ConfigError, naming `$.store.below.options`, on what cannot be."""
    try:
        found = msgspec.convert(dict(options), MooncakeOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_PATH}: {error}") from error
    sizes = capacity_bytes(found), segment_bytes(found), object_bytes(found)
    if not sizes[0]:
        raise ConfigError(
            f"{_PATH}.capacity: is 0, and so is segment; say how many bytes the pool has, as in capacity = '16GiB'"
        )
    if sizes[0] < CAPACITY_MIN:
        raise ConfigError(
            f"{_PATH}.capacity: {sizes[0]} bytes are less than {format_bytes(CAPACITY_MIN)}; say what all hosts give together"
        )
    if sizes[0] < sizes[1]:
        raise ConfigError(
            f"{_PATH}.capacity: {found.capacity!r} is less than segment, {found.segment!r}, which is a part of it; "
            "say what all hosts give together"
        )
    if "://" not in found.master and not _is_address(found.master):
        raise ConfigError(
            f"{_PATH}.master: {found.master!r} is no host:port; write where the master listens, as in '10.0.0.1:50051'"
        )
    if not found.host.strip() or "://" in found.host:
        raise ConfigError(
            f"{_PATH}.host: {found.host!r} is no address of this host; write one, as in '10.0.0.2'"
        )
    if not 4096 <= sizes[2] <= 64 * 2**20:
        raise ConfigError(f"{_PATH}.object_bytes: {found.object_bytes!r} is not between 4KiB and 64MiB")
    return found


def _is_address(word: str) -> bool:
    host, _, port = word.rpartition(":")
    return bool(host.strip()) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16


def segment_bytes(options: MooncakeOptions) -> int:
    """What this process gives."""
    return parse_bytes(options.segment, f"{_PATH}.segment")


def capacity_bytes(options: MooncakeOptions) -> int:
    """What the pool has."""
    return parse_bytes(options.capacity, f"{_PATH}.capacity") or segment_bytes(options)


def object_bytes(options: MooncakeOptions) -> int:
    """Most bytes of an object of several pages."""
    return parse_bytes(options.object_bytes, f"{_PATH}.object_bytes")
