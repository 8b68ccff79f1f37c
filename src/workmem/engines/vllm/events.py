"""vLLM's KV events as they arrive, and what each says to the residency index."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from workmem.index.residency import BlockHash, Holder, Origin, ResidencyIndex

DEVICE = "GPU"
"""The medium of the engine's own blocks, on a CPU as well."""


class BlockStored(msgspec.Struct, tag=True):
    """Blocks came to be in a medium, neighbours in a prefix."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """For each block: the adapter's name, where there is one, then images and such as lists, then the salt."""
    group_idx: int | None = None
    session_id: str | None = None

    @property
    def salt(self) -> str:
        """Of the request that brought the blocks, if they are the first of a context."""
        keys = self.extra_keys[0] if self.extra_keys and self.parent_block_hash is None else None
        texts = [key for key in keys or () if isinstance(key, str)]
        return next(iter(texts[1:] if self.lora_name else texts), "")


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks are no longer in a medium."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The engine's own blocks are all gone. Says nothing of what lies below them."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct):
    """What one step of an engine said."""

    events: list[Event]
    rank: int
    skipped: int
    """Events of a kind, or in a form, that is not known here."""


class _Wire(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_WIRE = msgspec.msgpack.Decoder(_Wire)
_EVENT = msgspec.msgpack.Decoder(Event)


def decode_batch(payload: bytes) -> Batch:
    """Read one message's payload. Raises msgspec.DecodeError where it is none of vLLM's."""
    wire = _WIRE.decode(payload)
    events: list[Event] = []
    for raw in wire.events:
        try:
            events.append(_EVENT.decode(raw))
        except msgspec.DecodeError:
            # A newer engine may say more; what is understood still counts.
            continue
    return Batch(events, wire.data_parallel_rank or 0, len(wire.events) - len(events))


def apply(batch: Batch, engine: str, index: ResidencyIndex, counts: Counter[str]) -> None:
    """Tell `index` what `engine` said."""
    counts["events_skipped"] += batch.skipped
    for event in batch.events:
        if isinstance(event, BlockStored):
            index.stored(
                _holder(engine, batch.rank, event),
                _hashes(event.block_hashes),
                parent=event.parent_block_hash,
                tokens=event.token_ids,
                block_tokens=event.block_size,
                origin=Origin(event.salt, event.lora_name or "", event.session_id or ""),
            )
            counts["blocks_stored"] += len(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            index.removed(_holder(engine, batch.rank, event), _hashes(event.block_hashes))
            counts["blocks_removed"] += len(event.block_hashes)
        else:
            # Only the pool of the engine's own blocks says this; tiers below it go on holding theirs.
            counts["blocks_cleared"] += index.cleared(engine, batch.rank, DEVICE)


def _holder(engine: str, rank: int, event: BlockStored | BlockRemoved) -> Holder:
    return Holder(engine, rank, event.medium or DEVICE, event.group_idx or 0)


def _hashes(names: list[int | bytes]) -> list[BlockHash]:
    return [*names]
