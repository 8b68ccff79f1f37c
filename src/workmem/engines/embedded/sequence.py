"""One request on its way through the engine: its tokens, its blocks, how far it has come."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from workmem.core.generation import Delta, GenerateRequest
from workmem.core.keys import BlockKey, block_key
from workmem.core.outcomes import COMPUTED, MissReason, SourceRun

if TYPE_CHECKING:
    from workmem.engines.embedded.detokenize import OutputText
    from workmem.engines.embedded.grammar import Grammar
    from workmem.engines.embedded.loading import LoadGate
    from workmem.engines.embedded.sampling import SamplerState
    from workmem.policy.handoff import HandoffWait
    from workmem.store.contract import Lease


class Phase(StrEnum):
    """Where a sequence stands. WAITING -> RUNNING -> DONE, and back to WAITING when preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class Sequence:
    """State of one request. Owned by the engine thread."""

    def __init__(
        self,
        request: GenerateRequest,
        *,
        root: bytes,
        block_tokens: int,
        max_tokens: int,
        arrived: float,
        emit: Callable[[Delta | BaseException], None],
    ) -> None:
        self.request = request
        self.tokens = list(request.token_ids)
        self.prompt_len = len(self.tokens)
        self.max_tokens = max_tokens
        self.block_tokens = block_tokens
        self.emit = emit
        self.phase = Phase.WAITING
        self.computed = 0
        """Leading tokens whose KV is in `table` or `spilled` blocks."""
        self.table: list[int] = []
        """Vram block of each block of the sequence behind the spilled ones."""
        self.committed = 0
        """Vram blocks promised to this sequence, taken ones included."""
        self.keys: list[BlockKey] = []
        self._root = root
        self.named = 0
        """Leading blocks that carry their key in the pool (or are known under another block)."""

        self.restored = 0
        """Leading blocks found in a tier at the last admission: they need no saving."""

        self.lease: Lease | None = None
        self.lease_start = 0
        self.lease_tiers: tuple[str, ...] = ()
        self.lookup_reason: MissReason | None = None
        self.gate: LoadGate | None = None
        self.spilled: list[tuple[Lease, int]] = []
        """Leading blocks read in place from dram: (lease, page index in it)."""
        self.spilling: Lease | None = None
        """Pages about to replace leading vram blocks, on their way to dram."""
        self.saving = 0
        """Blocks of this sequence that the store has not finished copying."""
        self.window = 0
        """Most vram blocks a sequence larger than the pool may use at a time; 0 if it fits."""
        self.reuse_denied = 0
        """Blocks from this index on must be computed: a load of this one failed."""
        self.denied_reason = MissReason.CORRUPT

        self.wait: HandoffWait | None = None
        """Where the request has a handoff."""
        self.wait_leased = 0
        """Leading blocks that were brought to dram while it waited."""

        self.sources: tuple[SourceRun, ...] = ()
        self.sampler: SamplerState
        self.text: OutputText
        self.grammar: Grammar | None = None
        self.eos_ids: frozenset[int] = frozenset()
        self.bypassed = 0
        """Admissions that overtook this sequence because it did not fit."""
        self.arrived = arrived
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.extend_keys()

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def is_loading(self) -> bool:
        """Admitted, but pages of it still have to come from below dram."""
        return self.gate is not None and not self.gate.is_open

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key: lower runs earlier."""
        return (self.request.priority, self.arrived, self.request.id)

    @property
    def output_len(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def total_blocks(self) -> int:
        """Blocks of the whole growth: prompt plus `max_tokens`."""
        return -(-(self.prompt_len + self.max_tokens) // self.block_tokens)

    @property
    def blocks_held(self) -> int:
        """Blocks of the sequence that have a place, spilled ones included."""
        return len(self.spilled) + len(self.table)

    @property
    def reusable_blocks(self) -> int:
        """Full blocks that may come from a cache: at least the last token is always computed."""
        return (len(self.tokens) - 1) // self.block_tokens

    def extend_keys(self) -> None:
        """Give every full block of `tokens` its key."""
        size = self.block_tokens
        while (len(self.keys) + 1) * size <= len(self.tokens):
            index = len(self.keys)
            self.keys.append(block_key(self.parent_of(index), self.tokens[index * size : (index + 1) * size]))

    def parent_of(self, index: int) -> bytes:
        """Key of the block before block `index`, or the namespace root."""
        return self.keys[index - 1] if index else self._root

    @property
    def root(self) -> bytes:
        """Root of this sequence's namespace."""
        return self._root

    def block_of_tokens(self, index: int) -> tuple[int, ...]:
        """Token ids of full block `index`."""
        return tuple(self.tokens[index * self.block_tokens : (index + 1) * self.block_tokens])

    def note_sources(self, tiers: list[str], reason: MissReason | None) -> None:
        """Account for every prompt token: `tiers` of the leading hit blocks, the rest computed.

        Kept from the first admission: what a preempted sequence finds again later is its own work,
        and counting that as a hit would flatter the cache.
        """
        runs: list[tuple[str, int, MissReason | None]] = []
        size = self.block_tokens
        for tier in tiers:
            if runs and runs[-1][0] == tier:
                runs[-1] = (tier, runs[-1][1] + size, None)
            else:
                runs.append((tier, size, None))
        left = self.prompt_len - len(tiers) * size
        tail = self.prompt_len - self.reusable_prompt_blocks * size
        if left > tail:
            runs.append((COMPUTED, left - tail, reason or MissReason.COLD))
        runs.append((COMPUTED, min(left, tail), MissReason.TAIL))
        self.sources = tuple(SourceRun(source, tokens, why) for source, tokens, why in runs if tokens)

    @property
    def reusable_prompt_blocks(self) -> int:
        """Like `reusable_blocks`, of the prompt alone."""
        return (self.prompt_len - 1) // self.block_tokens
