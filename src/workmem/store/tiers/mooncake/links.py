"""Clients of pools, one for each pool and way to it: each has thirty threads and takes seconds to end."""

from __future__ import annotations

import threading

import msgspec

from workmem.store.tiers.mooncake.link import Link
from workmem.store.tiers.mooncake.options import MooncakeOptions


class _Shared(msgspec.Struct, eq=False):
    making: threading.Lock
    """Held while the client joins, which takes 15 s where nobody answers: who goes another way need not wait."""
    link: Link | None = None
    users: int = 0


_lock = threading.Lock()
_links: dict[tuple[str | int, ...], _Shared] = {}


def borrow(options: MooncakeOptions) -> Link:
    """A client, maybe one that others use as well. Give it back with `give_back`. Raises as `Link`."""
    way = _way(options)
    with _lock:
        shared = _links.get(way)
        if shared is None:
            shared = _links[way] = _Shared(threading.Lock())
        shared.users += 1
    try:
        with shared.making:
            if shared.link is None:
                shared.link = Link(options)
            return shared.link
    except BaseException:
        _left_by_one(way)
        raise


def give_back(options: MooncakeOptions) -> None:
    """The last one ends it. No call of the user's may be under way."""
    link = _left_by_one(_way(options))
    if link is not None:
        link.close()


def _left_by_one(way: tuple[str | int, ...]) -> Link | None:
    """The client, where nobody uses it any more."""
    with _lock:
        shared = _links[way]
        shared.users -= 1
        if shared.users:
            return None
        del _links[way]
    return shared.link


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
