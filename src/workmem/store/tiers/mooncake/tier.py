"""The tier: what `[store.below] tier = "mooncake"` names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from workmem.core.outcomes import TierName
from workmem.store.codecs.pool_sealing import open_pool_cipher
from workmem.store.tiers.contract import (
    ArenaMemory,
    HeldPage,
    Options,
    Outcome,
    PageFacts,
    PageIn,
    PageName,
    PageOut,
    TierUsage,
)
from workmem.store.tiers.mooncake.answers import Answers
from workmem.store.tiers.mooncake.options import KEY_FILE, MooncakeOptions, capacity_bytes, parse_options
from workmem.store.tiers.mooncake.peers import Peers
from workmem.store.tiers.mooncake.session import Session
from workmem.store.tiers.mooncake.shelf import Shelf

FILLED = 0.65
"""Share of the pool that stores fill: the master's own eviction, which begins later, is not to come to it."""

Done = Callable[[int, Outcome], None]


class MooncakeTier:
    """See `contract.ListeningTier`, `contract.LosingTier` and `contract.AdvisedTier`."""

    kind = TierName.REMOTE

    def __init__(self, options: MooncakeOptions) -> None:
        """Raises ConfigError on a key file that cannot be used."""
        self._options = options
        self._cipher = open_pool_cipher(options.key_file, KEY_FILE) if options.key_file else None
        self._capacity_bytes = int(capacity_bytes(options) * FILLED)
        self._shelf = Shelf()
        self._peers = Peers()
        self.counts: Counter[str] = Counter()
        """How objects fared, by `put_` or `get_` and the result."""
        self._session: Session | None = None

    def open(self, arena: ArenaMemory) -> Iterable[HeldPage]:
        """See `Tier.open`. Raises ConfigError where Mooncake is not installed."""
        self._session = Session(self._options, arena, self._shelf, self._peers, self.counts, self._cipher)
        return self._session.catch_up()

    def watch(self, seen: Callable[[Sequence[HeldPage]], None]) -> None:
        """See `SharedTier.watch`."""
        if self._session is not None:
            self._session.listen(seen)

    def look_sooner(self, seconds: float) -> None:
        """See `ListeningTier.look_sooner`."""
        session = self._session
        if session is not None:
            session.look_sooner(seconds)

    def watch_losses(self, lost: Callable[[Sequence[PageName]], None]) -> None:
        """See `LosingTier.watch_losses`."""
        if self._session is not None:
            self._session.lost = lost

    def put(self, pages: Sequence[PageOut], done: Done) -> None:
        """See `Tier.put`."""
        answers = Answers(len(pages), done)
        if self._session is None:
            answers.rest(Outcome.FAILED)
        elif pages:
            self._session.put(pages, answers)

    def get(self, pages: Sequence[PageIn], done: Done) -> None:
        """See `Tier.get`."""
        answers = Answers(len(pages), done)
        if self._session is None:
            answers.rest(Outcome.FAILED)
        elif pages:
            self._session.getting.get(pages, answers)

    def drop(self, names: Sequence[PageName], done: Done) -> None:
        """See `Tier.drop`."""
        answers = Answers(len(names), done)
        if self._session is None:
            answers.rest(Outcome.FAILED)
        elif names:
            self._session.drop(names, answers)

    def advise(self, names: Sequence[PageName], facts: PageFacts) -> None:
        """See `AdvisedTier.advise`."""
        if self._session is not None:
            self._session.caring.note(names, facts)

    def usage(self) -> TierUsage:
        """See `Tier.usage`."""
        return TierUsage(self._capacity_bytes, self._shelf.used_bytes, len(self._shelf))

    def close(self, timeout_s: float) -> bool:
        """See `Tier.close`."""
        session = self._session
        if session is None:
            return True
        if not session.close(timeout_s):
            return False
        self._session = None
        return True


def mooncake_tier(options: Options) -> MooncakeTier:
    """A `TierFactory`."""
    return MooncakeTier(parse_options(options))
