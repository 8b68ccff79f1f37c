"""Clients of pools, one for each pool and way to it: each has thirty threads and takes seconds to end."""

from __future__ import annotations

import threading

import msgspec

from workmem.store.tiers.mooncake.link import Link
from workmem.store.tiers.mooncake.options import MooncakeOptions


class _Shared(msgspec.Struct, eq=False):
    link: Link
    users: int = 1


_lock = threading.Lock()
_links: dict[tuple[str | int, ...], _Shared] = {}


def borrow(options: MooncakeOptions) -> Link:
    """A client, maybe one that others use as well. Give it back with `give_back`. Raises as `Link`."""
    way = _way(options)
    with _lock:
        shared = _links.get(way)
        if shared is None:
            shared = _links[way] = _Shared(Link(options))
        else:
            shared.users += 1
        return shared.link


def give_back(options: MooncakeOptions) -> None:
    """The last one ends it. No call of the user's may be under way."""
    way = _way(options)
    with _lock:
        shared = _links[way]
        shared.users -= 1
        if shared.users:
            return
        del _links[way]
    shared.link.close()


def _way(options: MooncakeOptions) -> tuple[str | int, ...]:
    return (
        options.master,
        options.host,
        options.protocol,
        options.devices,
        str(options.segment),
        options.preferred_segment,
        options.tenant,
    )
