"""Settings of `workmem cluster`. Sizes take units ("4GiB")."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, lt=1)]


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cluster]` of the configuration: this host's part in a pool that Mooncake runs."""

    master: str = ""
    """Master to join: `host:port`, or `etcd://host:port` of a highly available one. Empty starts one on this host."""
    host: str = "127.0.0.1"
    """This host's address as the others reach it. A master started here listens on it alone."""
    port: Port = 50051
    """Port of a master started here; 0 takes a free one."""
    admin_host: str = "127.0.0.1"
    """Address on which a master started here answers `cluster status`. Whoever reaches it can empty the pool."""
    admin_port: Port = 9003
    """Its port; 0 takes a free one."""
    admin_urls: tuple[Annotated[str, Meta(pattern=r"^http://[^\s/?#]+$")], ...] = ()
    """Where masters answer, as in `http://10.0.0.1:9003`; empty takes the host of `master`, or `admin_host`, and `admin_port`."""
    segment_bytes: str | int = "4GiB"
    """Memory that this host gives to the pool; 0 gives none."""
    allow_public: bool = False
    """Start although an address is public, or is every address of this host. Mooncake asks nobody for a password."""
    etcd: str = ""
    """Endpoints of etcd (`10.0.0.5:2379;10.0.0.6:2379`): masters started with it elect one of them, the others stand by."""
    oplog: bool = True
    """With `etcd`: keep the list of pages there too. Without it, a new master begins with an empty pool."""
    client_ttl_s: Annotated[int, Meta(ge=1)] = 30
    """A process that the master has not heard of for so long is taken for dead, and its pages with it."""
    lease_s: Annotated[int, Meta(ge=1)] = 10
    """A page that was read is not evicted by the master for so long."""
    watermark: Share = 0.7
    """Share of the pool from which on the master evicts."""
    evict_share: Share = 0.25
    """Share of the pages that the master evicts at once."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How bytes travel."""
    devices: str = ""
    """Network devices for rdma, separated by commas."""
    start_s: Seconds = 30.0
    """Longest wait for a master, and for a segment, at the start."""
    drain_s: Seconds = 60.0
    """Longest that pages are moved to other hosts when this one stops."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.master and self.etcd:
            raise ValueError(
                f"etcd {self.etcd!r} is for a master started here, and master {self.master!r} says to join another; "
                f"leave master empty, or join with master = 'etcd://{self.etcd}'"
            )
        if self.master and "://" not in self.master and not _is_address(self.master):
            raise ValueError(
                f"master {self.master!r} is neither host:port nor etcd://host:port; write it as in '10.0.0.1:50051'"
            )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
