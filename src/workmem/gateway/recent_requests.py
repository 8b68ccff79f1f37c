"""The bodies of recent requests, kept compressed, so that it can be said later why one missed."""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from workmem.core.errors import ClientError
from workmem.core.units import parse_bytes
from workmem.gateway.config import ServerConfig
from workmem.prompt.canonical.canonicalise import canonicalise
from workmem.prompt.canonical.rule import Canonical
from workmem.prompt.causes.answers import Made
from workmem.prompt.decode import decode_json
from workmem.prompt.dialects.places import Dialect

_BEGINNING_CHARS = 2048
_SMALL_BYTES = 2048
"""Not worth a thread's while."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost, as the engine or the server behind us says it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None where nobody says."""


class Kept(msgspec.Struct, kw_only=True, eq=False, weakref=True):
    """A request as it is remembered."""

    number: int
    name: str = ""
    """The id by which it is explained; of the embedded engine's requests also that of its prompt in the history."""
    space: str
    """Whose it is: requests of others are never compared with it."""
    session: str
    dialect: Dialect | None
    """None for a raw prompt."""
    data: bytes
    is_compressed: bool = False
    earlier: tuple[int, ...]
    """Numbers of requests that it may be meant to continue, the likeliest first, as they were when it came."""
    rules: frozenset[str] = frozenset()
    """Canonical rules that it got."""
    made: Made | None = None
    outcome: Outcome | None = None

    def body(self) -> dict[str, Any]:
        """What the client sent; nothing where that was no object."""
        try:
            return decode_json(zlib.decompress(self.data) if self.is_compressed else self.data)
        except ClientError:
            return {}

    def canonical(self) -> Canonical:
        """What was made of it before it was rendered, or passed on."""
        body = self.body()
        return Canonical(body) if self.dialect is None else canonicalise(body, self.dialect, self.rules)


class RecentRequests:
    """Bounded by count and by bytes as they lie here, oldest out first. One thread owns it."""

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._count = 0
        self._held: OrderedDict[int, Kept] = OrderedDict()
        self._latest: OrderedDict[str, int] = OrderedDict()
        self._named: OrderedDict[str, int] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        """Of all bodies."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._held)

    def add(
        self,
        data: bytes,
        body: Mapping[str, Any],
        dialect: Dialect | None,
        *,
        space: str,
        session: str,
        rules: frozenset[str] = frozenset(),
    ) -> Kept | None:
        """Remember a request on its way; None where such bodies are not kept.

        What costs is left for later: bodies are compressed on another thread.
        """
        if len(data) > self._bytes_max:
            return None
        keys = [f"session\0{space}\0{session}"] if session else []
        if beginning := _beginning(body, dialect):
            keys.append(f"beginning\0{space}\0{beginning}")
        keys.append(f"space\0{space}")
        earlier = tuple(dict.fromkeys(self._latest[key] for key in keys if key in self._latest))
        self._count += 1
        kept = Kept(
            number=self._count,
            space=space,
            session=session,
            dialect=dialect,
            data=data,
            earlier=earlier,
            rules=rules,
        )
        self._held[kept.number] = kept
        self._bytes += len(data)
        for key in keys:
            self._latest[key] = kept.number
            self._latest.move_to_end(key)
        self._trim()
        if len(data) > _SMALL_BYTES:
            self._compress_later(kept)
        return kept

    def name(self, kept: Kept, name: str) -> None:
        """Have `kept` found as `name`; a name that is used again is that of the latest."""
        kept.name = name
        self._named[name] = kept.number
        self._named.move_to_end(name)
        while len(self._named) > 2 * self._requests_max:
            self._named.popitem(last=False)

    def named(self, name: str) -> Kept | None:
        """The request of that name, while it is held."""
        return self._held.get(self._named.get(name, 0))

    def numbered(self, number: int) -> Kept | None:
        """The request of that number, while it is held."""
        return self._held.get(number)

    def _trim(self) -> None:
        while len(self._held) > self._requests_max or self._bytes > self._bytes_max:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= len(oldest.data)
        while len(self._latest) > 3 * self._requests_max:
            self._latest.popitem(last=False)

    def _compress_later(self, kept: Kept) -> None:
        def take(done: asyncio.Future[bytes]) -> None:
            if done.cancelled() or done.exception() is not None or kept.number not in self._held:
                return
            self._bytes += len(done.result()) - len(kept.data)
            kept.data, kept.is_compressed = done.result(), True

        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, zlib.compress, kept.data, 1).add_done_callback(take)


def _beginning(body: Mapping[str, Any], dialect: Dialect | None) -> str:
    """The first words of the user: they stay when everything before them changes."""
    if dialect is None:
        return ""
    first = next((place.text for place in dialect.texts(body) if place.role == "user"), "")
    return first[:_BEGINNING_CHARS]


def recent_requests(config: ServerConfig) -> RecentRequests:
    """As large as `config` says."""
    return RecentRequests(config.explain_prompts_max, parse_bytes(config.explain_bytes_max))
