"""What the connector knows of one request, and what it sees of vLLM's own object for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from workmem.core.keys import BlockKey
from workmem.engines.vllm.facts import Scope
from workmem.engines.vllm.steps import Loaded
from workmem.policy.handoff import HandoffWait
from workmem.prompt.hints import read_hints
from workmem.store.contract import Lease

PEER = "peer"
"""Source of tokens that another connector beside ours loaded."""


class EngineRequest(Protocol):
    """The part of vLLM's `Request` that is read here."""

    @property
    def request_id(self) -> str:
        """VLLM's name for it, with a random end."""
        ...

    @property
    def num_tokens(self) -> int:
        """Of the prompt and what was generated so far."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Of those, how many have their KV in the engine."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and what was generated so far."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Of every full block: chained, so that each names all before it."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """Whose request it is, where its blocks are not for all."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the client said to connectors."""
        ...

    @property
    def kv_hints(self) -> object:
        """What an orchestrator said: vLLM's `KvHintsEnvelope`."""
        ...

    @property
    def session_id(self) -> str | None:
        """Whose turn it is."""
        ...


class Tracked:
    """A request from its arrival to its end."""

    def __init__(self, request: EngineRequest, scope: Scope) -> None:
        self.request = request
        self.scope = scope
        self.hints = read_hints(request.kv_hints, request.kv_transfer_params, request.session_id)
        self.runs = False
        """The engine has computed for it, so it has blocks."""
        self.local = 0
        """Leading blocks that the engine had itself when it last asked."""
        self.own = 0
        """As `local`, when it first had its turn: later it finds what it computed itself."""
        self.was_preempted = False
        self.promised: tuple[str, ...] = ()
        """Tiers of the blocks behind those that were promised when it last asked."""
        self.is_async = False
        self.is_ours = False
        """They are loaded by us: where there are other connectors, one of those may have been chosen."""
        self.arrived = 0
        """Blocks behind `local` that came while it waited aside."""
        self.load_from = 0
        """Where the load that is under way began, in blocks."""
        self.limit = -1
        """Blocks from this one on could not be loaded, and are not promised to it again; -1: none failed."""
        self.saved = 0
        """Leading blocks that the store has or has been given."""
        self.prefetched: list[Lease] = []
        self.prefetched_to = 0
        """Leading blocks that are in those, or need not be."""
        self.wait: HandoffWait | None = None
        """Where it has a handoff."""
        self.sources: Counter[str] = Counter()
        """Prompt tokens by where they came from, but for those computed."""
        self.miss = ""
        """Why the first block that was computed was missed."""

    def keys(self, start: int, end: int) -> tuple[BlockKey, ...]:
        """Keys of blocks `start` to before `end`, as far as they are full."""
        return tuple(BlockKey(bytes(key)) for key in self.request.block_hashes[start:end])

    def asks(self, local: int) -> None:
        """It is about to be given blocks; the engine has `local` of them."""
        self.was_preempted = self.was_preempted or self.runs
        self.local, self.runs, self.arrived = local, False, 0
        self.promised, self.is_async, self.is_ours = (), False, False
        if not self.was_preempted:
            self.own = local
            self.sources.clear()

    def starts(self, has: int, block_tokens: int) -> tuple[int, int]:
        """It has its turn with `has` tokens. First and last block, not included, that neither the engine nor we had."""
        self.runs = True
        ours = self.arrived if self.is_async else len(self.promised)
        first = self.local + (ours if self.is_ours else 0)
        end = max(first, has // block_tokens)
        if end > first and not self.was_preempted:
            self.sources[PEER] = (end - first) * block_tokens
        return first, end

    def loaded(self, load: Loaded, block_tokens: int) -> BlockKey | None:
        """A load has ended. Returns the key that could not be loaded, if any."""
        self.arrived = load.pages
        for tier in self.promised[: load.pages] if not self.was_preempted else ():
            self.sources[tier] += block_tokens
        if load.pages == len(self.promised):
            return None
        self.miss = load.why_short
        self.limit = self.load_from + load.pages
        keys = self.keys(self.limit, self.limit + 1)
        return keys[0] if keys else None
