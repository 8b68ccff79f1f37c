"""Numbers of a folder: what is live, what is dead, and where."""

from __future__ import annotations

import msgspec

from workmem.core.layout import KVLayout, Namespace
from workmem.store.codecs.choose import is_approximate
from workmem.store.selector import shown_digest
from workmem.store.tools.folder_view import FolderView, SpaceView
from workmem.store.tools.running_stat import RunningStat

PREFIX_DIGITS = 12
"""Hex digits of a key or root that are shown: enough to tell them apart."""


class SpaceStat(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace. Model, adapter and tenant are named by `names` only where that was asked for."""

    root: str
    layout: str
    model: str
    adapter: str
    epoch: int
    tenant: str
    approximate: bool
    """Its pages may have been rounded to take less room."""
    pages: int
    bytes: int
    """Bytes that its live pages take on disk."""


class SegmentStat(msgspec.Struct, frozen=True, kw_only=True):
    """A segment file. What is not live is its header and dead pages."""

    number: int
    bytes: int
    live_bytes: int
    pages: int
    problem: str


class StoreStat(msgspec.Struct, frozen=True, kw_only=True):
    """A folder as a whole."""

    path: str
    store_id: str
    holder: str
    journal_bytes: int
    torn_bytes: int
    records: int
    live_records: int
    pages: int
    segment_bytes: int
    live_bytes: int
    spaces: list[SpaceStat]
    segments: list[SegmentStat]
    running: RunningStat | None = None
    """Where the store that has the folder was asked."""

    @property
    def dead_records(self) -> int:
        """Records that a rewritten journal would leave out."""
        return self.records - self.live_records

    @property
    def dead_bytes(self) -> int:
        """Bytes of segment files that hold no live page."""
        return self.segment_bytes - self.live_bytes


def stat_of(view: FolderView, *, show_names: bool) -> StoreStat:
    """Count what `view` names. Without `show_names` models, adapters and tenants are digests."""
    segments = _segments(view)
    return StoreStat(
        path=str(view.path),
        store_id=view.store_id.hex(),
        holder=view.holder,
        journal_bytes=view.journal_bytes,
        torn_bytes=view.torn_bytes,
        records=view.record_count,
        live_records=view.live_record_count,
        pages=view.page_count,
        segment_bytes=sum(segment.bytes for segment in segments),
        live_bytes=sum(segment.live_bytes for segment in segments),
        spaces=[space_stat(space, show_names=show_names) for space in view.spaces],
        segments=segments,
    )


def space_stat(space: SpaceView, *, show_names: bool) -> SpaceStat:
    """One namespace."""
    namespace = space.namespace
    shown = _as_it_is if show_names else shown_digest
    return SpaceStat(
        root=space.root.hex()[:PREFIX_DIGITS],
        layout=layout_text(namespace.layout),
        model=shown(namespace.model_fingerprint),
        adapter=shown(namespace.adapter),
        epoch=namespace.weights_epoch,
        tenant=shown(namespace.tenant_salt),
        approximate=is_approximate(namespace.layout),
        pages=len(space.pages),
        bytes=sum(page.length for page in space.pages.values()),
    )


def layout_text(layout: KVLayout) -> str:
    """A layout in one line: `bf16 30x3x64, 16 tokens` is 30 layers of 3 KV heads of 64."""
    text = f"{layout.dtype} {layout.layers}x{layout.kv_heads}x{layout.head_dim}, {layout.block_tokens} tokens"
    if layout.quantization != "none":
        text += f", {layout.quantization}"
    if layout.world_size > 1:
        text += f", rank {layout.rank} of {layout.world_size}"
    return text


def description(namespace: Namespace, *, show_names: bool) -> dict[str, object]:
    """All fields of a namespace for a file, those that name somebody as digests unless asked for."""
    fields: dict[str, object] = msgspec.to_builtins(namespace)
    if not show_names:
        for name in ("model_fingerprint", "adapter", "tenant_salt"):
            fields[name] = shown_digest(str(fields[name]))
    return fields


def _segments(view: FolderView) -> list[SegmentStat]:
    live: dict[int, list[int]] = {number: [] for number in view.segments}
    for space in view.spaces:
        for page in space.pages.values():
            live.setdefault(page.segment, []).append(page.length)
    return [
        SegmentStat(
            number=segment.number,
            bytes=segment.size,
            live_bytes=sum(live[segment.number]) if not segment.problem else 0,
            pages=len(live[segment.number]) if not segment.problem else 0,
            problem=segment.problem,
        )
        for segment in view.segments.values()
    ]


def _as_it_is(text: str) -> str:
    return text
