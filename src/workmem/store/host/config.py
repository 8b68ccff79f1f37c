"""Settings of the store that a host's processes share."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[store.host]`: one store for all processes of a host (`workmem store serve`)."""

    attach: Literal["never", "auto", "require"] = "auto"
    """Auto: the host's store where one is served from the folder of `store.ssd.path`, else a store of this process's own. Never: one of its own. Require: the host's, whatever its folder, or no start."""
    socket: str = ""
    """Unix socket of the store; empty takes `$XDG_RUNTIME_DIR/workmem/store.sock`, or `run/store.sock` in the cache folder. Its folder must be closed to other users."""
    call_s: Annotated[float, Meta(gt=0)] = 1.0
    """Longest a client waits for a reply; past it the store counts as gone until it answers again."""
    lease_s: Annotated[float, Meta(gt=0)] = 30.0
    """A client that stops renewing loses its leases after this long."""
    reservation_s: Annotated[float, Meta(gt=0)] = 30.0
    """A page must be in its frame within this time, or is not stored."""
    connections_max: Annotated[int, Meta(ge=2)] = 256
    """A client has two."""
