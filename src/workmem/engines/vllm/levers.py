"""What agents, or whoever speaks for them, can do about their contexts: hints and pins of one engine."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from workmem.core.errors import ClientError
from workmem.core.hints import Action, Kind, Outcome
from workmem.core.keys import BlockKey
from workmem.engines.vllm.config import VllmConfig
from workmem.engines.vllm.facts import Scope
from workmem.engines.vllm.pins import BlockPool, DevicePins, Owner
from workmem.engines.vllm.requests import EngineRequest, Tracked
from workmem.policy.order import Prospect
from workmem.policy.retention import Lru, Retention, Ttl, Turn
from workmem.store.contract import Lease, SteeredStore

SESSIONS_MAX = 1024
SESSION_KEYS_MAX = 1 << 18
"""Of all sessions together, some 25 MiB."""
LEASES_MAX = 64
NAME_MAX = 400
"""Characters of an owner or a name that the store is told as they are; of others it is told a digest."""
PREFETCH_S = 60.0
PREFETCH_MAX_S = 300.0


class Session(msgspec.Struct, frozen=True):
    """The last turn of a session that ended."""

    scope: Scope
    keys: tuple[BlockKey, ...]


class Sessions:
    """Those seen last. Bounded: a session that is forgotten cannot be prefetched or demoted by name."""

    def __init__(self) -> None:
        self._known: OrderedDict[Owner, Session] = OrderedDict()
        self._keys = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, owner: Owner) -> Session | None:
        """None where it is not known."""
        return self._known.get(owner)

    def set(self, owner: Owner, session: Session) -> None:
        """It has had a turn."""
        self._forget(owner)
        self._known[owner] = session
        self._keys += len(session.keys)
        while len(self._known) > SESSIONS_MAX or (self._keys > SESSION_KEYS_MAX and len(self._known) > 1):
            self._forget(next(iter(self._known)))

    def _forget(self, owner: Owner) -> None:
        known = self._known.pop(owner, None)
        if known is not None:
            self._keys -= len(known.keys)


class Levers:
    """Of one engine. `lease` brings keys to dram and holds them there, None where it has no room for them.

    `roots` has the root of every worker. Called by the scheduler's thread alone.
    """

    def __init__(
        self,
        store: SteeredStore,
        settings: VllmConfig,
        block_tokens: int,
        roots: Callable[[Scope], Sequence[bytes]],
        lease: Callable[[Scope, Sequence[BlockKey], str, float], Lease | None],
        give_back: Callable[[Lease], None],
        clock: Callable[[], float],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.pins: DevicePins | None = None
        self._store = store
        self._settings = settings
        self._size = block_tokens
        self._roots = roots
        self._lease = lease
        self._give_back = give_back
        self._clock = clock
        self._retention: Retention = Ttl(settings.pin_ttl_s) if settings.retention == "ttl" else Lru()
        self._sessions = Sessions()
        self._leases: OrderedDict[Owner, tuple[Lease, float]] = OrderedDict()
        """And when each ends."""
        self._watermark = 0
        self._step_blocks = 0

    def bind(
        self, pool: BlockPool, *, longest_tokens: int, step_tokens: int, watermark_blocks: int = 0
    ) -> None:
        """The engine's pool is there.

        longest_tokens: of a request; step_tokens: the most that a step computes; watermark_blocks: what the engine
        leaves free when it admits a request beside others.
        """
        self._watermark = watermark_blocks
        self._step_blocks = -(-step_tokens // self._size)
        largest = -(-longest_tokens // self._size)
        self.pins = DevicePins(
            pool, self._retention, self._clock, share=self._settings.pin_share, largest=largest
        )

    # -- a request

    def arrives(self, tracked: Tracked) -> None:
        """Do of its hints what cannot wait for its end."""
        hints = tracked.hints
        for action in hints.actions:
            self.counts[f"lever_{action.kind}"] += 1
            if action.kind is Kind.PREFETCH:
                hints.outcomes.append(self._prefetch(tracked, action))
            elif action.kind is Kind.DEMOTE and action.payload.session not in (None, hints.session):
                hints.outcomes.append(self._demote(tracked, action))

    def asks(
        self, request: EngineRequest, hits: int, tracked: Tracked | None, others: Mapping[str, Tracked]
    ) -> None:
        """A request is about to be given blocks, `hits` of which the engine has. `tracked`: where it is one of ours."""
        pins = self.pins
        if not pins:
            return
        total = -(-request.num_tokens // self._size) + self._watermark
        hashes = request.block_hashes[:hits]
        # What others still need for their prompts was counted when they were admitted: it must not go to this one.
        spare = sum(self._rest(other) for other in others.values() if other.runs and other is not tracked)
        owner = None if tracked is None else self._owner(tracked, None)
        if pins.give_way(lambda: pins.needed(total, hashes), spare=spare, last=owner):
            self.counts["pins_gave_way_to_waiting"] += 1

    def steps(self, running: Sequence[tuple[Tracked, int]]) -> None:
        """A step is made up. `running`: each request in it, and how many tokens it has after it."""
        pins = self.pins
        if pins:
            pins.expire()
        if pins:
            wanted = sum(max(1, self._rest(tracked, has)) for tracked, has in running)
            if pins.give_way(lambda: min(wanted, self._step_blocks + len(running))):
                self.counts["pins_gave_way_to_running"] += 1
        if self._leases:
            now = self._clock()
            for owner in [owner for owner, (_, ends) in self._leases.items() if ends <= now]:
                self._drop_lease(owner)

    def is_short(self) -> bool:
        """The engine is about to preempt: have a step's blocks free. False where no pin could help."""
        pins = self.pins
        if not pins:
            return False
        # What the engine wants is not said, but it is more than is free.
        short = pins.free + 1
        free = pins.give_way(lambda: short, spare=self._step_blocks)
        self.counts["preemptions_spared"] += free
        return free

    def finished(self, tracked: Tracked, blocks: Sequence[int]) -> list[dict[str, str]]:
        """A turn has ended; `blocks`: its whole table where they may be kept. Returns what became of its hints."""
        hints = tracked.hints
        keys = tracked.keys(0, tracked.request.num_tokens // self._size)
        owner = self._owner(tracked, None)
        asked = False
        for action in hints.actions:
            if action.kind in (Kind.PIN, Kind.RETAIN, Kind.SHARE):
                asked = asked or action.kind is Kind.PIN
                hints.outcomes.append(self._keep(tracked, action, keys, blocks))
            elif action.kind is Kind.DEMOTE and action.payload.session in (None, hints.session):
                asked = True
                self._let_go(tracked.scope, keys, owner)
                hints.outcomes.append(Outcome(action.id, "accepted"))
        seconds = self._retention.keep_s(Turn(session=hints.session))
        if self.pins is not None and blocks and seconds and not asked:
            self.pins.pin(owner, "", blocks, ttl_s=seconds)
        if hints.session:
            self._sessions.set(owner, Session(tracked.scope, keys))
            self._drop_lease(owner)
        self.counts.update(f"hints_{outcome.outcome}" for outcome in hints.outcomes)
        return [outcome.told() for outcome in hints.outcomes]

    # -- the engine

    def gives_way(self) -> int:
        """Blocks that are held for contexts between turns, and by nobody else."""
        return 0 if self.pins is None else self.pins.within_reach

    def release(self) -> None:
        """Hold nothing of the engine's any more."""
        if self.pins is not None:
            self.pins.release()

    def close(self) -> None:
        """Give back all that is held."""
        self.release()
        for owner in list(self._leases):
            self._drop_lease(owner)

    # -- inside

    def _owner(self, tracked: Tracked, session: str | None) -> Owner:
        """Of `session`, or of the request's own; a request without one is a session of its own."""
        named = session or tracked.hints.session
        return tracked.scope.salt, f"session/{named}" if named else f"request/{tracked.request.request_id}"

    def _rest(self, tracked: Tracked, has: int | None = None) -> int:
        """Blocks that it still needs for the tokens it has now."""
        has = tracked.request.num_computed_tokens if has is None else has
        return max(0, -(-tracked.request.num_tokens // self._size) - -(-has // self._size))

    def _seconds(self, action: Action) -> tuple[float, bool]:
        """For how long, and whether that is less than was asked for."""
        asked, most = action.payload.ttl_s, self._settings.pin_ttl_max_s
        if asked is None:
            return min(self._settings.pin_ttl_s, most), False
        # Written so that what is no number is too long.
        return (asked, False) if asked <= most else (most, True)

    def _keep(
        self, tracked: Tracked, action: Action, keys: Sequence[BlockKey], blocks: Sequence[int]
    ) -> Outcome:
        said = action.payload
        owner = (
            (tracked.scope.salt, f"group/{said.group}")
            if action.kind is Kind.SHARE
            else self._owner(tracked, said.session)
        )
        seconds, clipped = self._seconds(action)
        count = len(keys) if said.tokens is None else min(len(keys), said.tokens // self._size)
        if not count:
            return Outcome(action.id, "rejected", f"there is no full block of {self._size} tokens to keep")
        why = f"at most {seconds:g} s (vllm.pin_ttl_max_s)" if clipped else ""
        try:
            if self._pin_in_store(tracked.scope, keys[:count], owner, seconds):
                clipped, why = True, "the store keeps less: store.pins.budget"
        except ClientError as error:
            return Outcome(action.id, "rejected", str(error))
        if action.kind is Kind.PIN:
            if self.pins is None or not blocks:
                return Outcome(action.id, "clipped", "the request was cut off: only the store keeps it")
            wanted = min(count, len(blocks))
            kept = self._retention.keep_s(Turn(session=tracked.hints.session, asked_s=seconds))
            held = self.pins.pin(owner, "", blocks[:wanted], ttl_s=kept, priority=said.priority)
            if held < wanted:
                clipped, why = True, f"{held} of {wanted} blocks are held in the engine (vllm.pin_share)"
        return Outcome(action.id, "clipped" if clipped else "accepted", why)

    def _pin_in_store(self, scope: Scope, keys: Sequence[BlockKey], owner: Owner, seconds: float) -> bool:
        """Whether its budget cut that short."""
        cut = False
        tenant, pinned = _told(owner)
        for rank, root in enumerate(self._roots(scope)):
            name = f"{pinned}/{rank}"
            result = self._store.pin(root, keys, owner=tenant, name=name, ttl_s=seconds)
            cut = cut or name in result.demoted
        return cut

    def _let_go(self, scope: Scope, keys: Sequence[BlockKey], owner: Owner) -> None:
        if self.pins is not None:
            self.pins.unpin_all(owner)
        tenant, pinned = _told(owner)
        for rank, root in enumerate(self._roots(scope)):
            self._store.unpin(tenant, f"{pinned}/{rank}")
            self._store.announce(root, keys, Prospect.DONE)

    def _demote(self, tracked: Tracked, action: Action) -> Outcome:
        owner = self._owner(tracked, action.payload.session)
        session = self._sessions.get(owner)
        if session is None:
            return Outcome(action.id, "missing", "no turn of that session is known")
        self._drop_lease(owner)
        self._let_go(session.scope, session.keys, owner)
        return Outcome(action.id, "accepted")

    def _prefetch(self, tracked: Tracked, action: Action) -> Outcome:
        named = action.payload.session
        if named is None:
            # Its own prompt is on its way already, as every request's.
            return Outcome(action.id, "accepted")
        owner = self._owner(tracked, named)
        session = self._sessions.get(owner)
        if session is None:
            return Outcome(action.id, "missing", "no turn of that session is known")
        self._drop_lease(owner)
        while len(self._leases) >= LEASES_MAX:
            self._drop_lease(next(iter(self._leases)))
        keys = session.keys
        if action.payload.tokens is not None:
            keys = keys[: action.payload.tokens // self._size]
        asked = action.payload.ttl_s
        seconds = PREFETCH_S if asked is None else min(asked, PREFETCH_MAX_S)
        lease = self._lease(session.scope, keys, owner[1], seconds)
        if lease is None:
            return Outcome(action.id, "rejected", "dram has no room for it (vllm.prefetch_share)")
        if not lease.keys:
            self._give_back(lease)
            return Outcome(action.id, "missing", "the store has nothing of it")
        self._leases[owner] = lease, self._clock() + seconds
        return Outcome(action.id, "accepted")

    def _drop_lease(self, owner: Owner) -> None:
        found = self._leases.pop(owner, None)
        if found is not None:
            self._give_back(found[0])


def _told(owner: Owner) -> tuple[str, str]:
    """Owner and name of a pin as the store is told: of a bounded length, whatever salt or request id clients chose."""
    tenant, name = (
        text
        if len(text) <= NAME_MAX and text.isprintable()
        else hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
        for text in owner
    )
    return f"vllm/{tenant}", name
