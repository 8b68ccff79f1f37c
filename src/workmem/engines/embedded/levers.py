"""What callers ask to be kept, brought back or let go: done through the store, which every engine of the host shares.

The engine's own memory holds what it can and nothing by name, so a `Pin` here is what the store keeps, and is answered
as clipped.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple
from weakref import WeakKeyDictionary

from workmem.core.errors import ClientError
from workmem.core.hints import Action, Kind, Outcome
from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason
from workmem.engines.embedded.sequence import Sequence
from workmem.policy.order import Prospect
from workmem.store.contract import SteeredStore

SESSIONS_MAX = 4096
KEYS_MAX = 1_000_000
"""Of all sessions together, some 100 MiB."""
PREFETCH_S = 10.0
"""Longest that pages on their way to dram are held for a prefetch."""
_NAME_MAX = 128

Owner = tuple[str, str]
"""Tenant, and a session or group."""


class _Context(NamedTuple):
    root: bytes
    keys: tuple[BlockKey, ...]


class Levers:
    """Owned by the engine thread."""

    def __init__(self, store: SteeredStore | None, *, ttl_s: float, ttl_max_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._ttl_max_s = ttl_max_s
        self._sessions: OrderedDict[Owner, _Context] = OrderedDict()
        self._held_keys = 0
        self._told: WeakKeyDictionary[Sequence, list[Outcome]] = WeakKeyDictionary()
        """What became of a request's hints before it ended; one that is cancelled takes it along."""

    def arrives(self, seq: Sequence) -> None:
        """Do what concerns other sessions: it does not wait for this request."""
        if not seq.request.hints:
            return
        told = self._told[seq] = list[Outcome]()
        for action in seq.request.hints:
            if action.kind is Kind.PREFETCH:
                told.append(self._prefetch(seq, action))
            elif action.kind is Kind.DEMOTE and _is_of_another(seq, action):
                told.append(self._demote(seq, action))

    def finished(self, seq: Sequence) -> tuple[Outcome, ...]:
        """A turn has ended: do the rest, and say what became of all of them."""
        keys, told = tuple(seq.keys), self._told.pop(seq, [])
        for action in seq.request.hints:
            if action.kind in (Kind.PIN, Kind.RETAIN, Kind.SHARE):
                told.append(self._keep(seq, action, keys))
            elif action.kind is Kind.DEMOTE and not _is_of_another(seq, action):
                told.append(self._let_go(action, _owner(seq, None), _Context(seq.root, keys)))
        if seq.request.caller.session and seq.request.reuse:
            self._remember(_owner(seq, None), _Context(seq.root, keys))
        return tuple(told)

    def _remember(self, owner: Owner, context: _Context) -> None:
        before = self._sessions.pop(owner, None)
        self._held_keys += len(context.keys) - (len(before.keys) if before else 0)
        self._sessions[owner] = context
        while len(self._sessions) > SESSIONS_MAX or (self._held_keys > KEYS_MAX and len(self._sessions) > 1):
            self._held_keys -= len(self._sessions.popitem(last=False)[1].keys)

    def _keep(self, seq: Sequence, action: Action, keys: tuple[BlockKey, ...]) -> Outcome:
        said = action.payload
        count = len(keys) if said.tokens is None else min(len(keys), said.tokens // seq.block_tokens)
        if not count:
            return Outcome(
                action.id, "rejected", f"there is no full block of {seq.block_tokens} tokens to keep"
            )
        if self._store is None or not seq.request.reuse:
            return Outcome(action.id, "rejected", "the request leaves nothing behind")
        tenant = seq.request.caller.tenant
        owner = (tenant, f"group/{said.group}") if action.kind is Kind.SHARE else _owner(seq, said.session)
        seconds = self._ttl_s if said.ttl_s is None else said.ttl_s
        why = ""
        # Written so that what is no number is too long.
        if not seconds <= self._ttl_max_s:
            seconds, why = self._ttl_max_s, f"at most {self._ttl_max_s:g} s (engine.hint_ttl_max_s)"
        place, name = _told(owner)
        try:
            kept = self._store.pin(seq.root, keys[:count], owner=place, name=name, ttl_s=seconds)
        except ClientError as error:
            return Outcome(action.id, "rejected", str(error))
        if name in kept.demoted:
            why = "the store keeps less: store.pins.budget"
        elif action.kind is Kind.PIN and not why:
            why = "kept in the store; the engine's own memory holds nothing by name"
        return Outcome(action.id, "clipped" if why else "accepted", why)

    def _demote(self, seq: Sequence, action: Action) -> Outcome:
        owner = _owner(seq, action.payload.session)
        context = self._sessions.get(owner)
        if context is None:
            return Outcome(action.id, "missing", "no turn of that session is known")
        return self._let_go(action, owner, context)

    def _let_go(self, action: Action, owner: Owner, context: _Context) -> Outcome:
        if self._store is not None:
            self._store.unpin(*_told(owner))
            self._store.announce(context.root, context.keys, Prospect.DONE)
        return Outcome(action.id, "accepted")

    def _prefetch(self, seq: Sequence, action: Action) -> Outcome:
        if not _is_of_another(seq, action):
            # Its own prompt is on its way already, as every request's.
            return Outcome(action.id, "accepted")
        context = self._sessions.get(_owner(seq, action.payload.session))
        if context is None:
            return Outcome(action.id, "missing", "no turn of that session is known")
        if self._store is None:
            return Outcome(action.id, "rejected", "there is no store to bring it from")
        tokens = action.payload.tokens
        keys = context.keys if tokens is None else context.keys[: tokens // seq.block_tokens]
        lease = self._store.lease(context.root, keys, owner="prefetch", ttl_s=PREFETCH_S)
        if not lease.keys:
            is_known = lease.failed in (None, MissReason.COLD)
            lease.release()
            return Outcome(action.id, "missing", "the store has nothing of it" if is_known else "not now")
        self._store.announce(context.root, lease.keys, Prospect.EXPECTED)
        # Once in dram they stay there by their own merit: nobody's room is held for a promise.
        lease.on_settled(lease.release)
        return Outcome(action.id, "accepted")


def _is_of_another(seq: Sequence, action: Action) -> bool:
    return action.payload.session not in (None, seq.request.caller.session)


def _owner(seq: Sequence, session: str | None) -> Owner:
    """Of `session`, or of the request's own; a request without one is a session of its own."""
    caller = seq.request.caller
    named = session or caller.session
    return caller.tenant, f"session/{named}" if named else f"request/{seq.id}"


def _told(owner: Owner) -> tuple[str, str]:
    """Owner and name of a pin as the store is told: of a bounded length, whatever tenants and clients are called."""
    tenant, name = (
        text
        if len(text) <= _NAME_MAX and text.isprintable()
        else hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
        for text in owner
    )
    return f"embedded/{tenant}", name
