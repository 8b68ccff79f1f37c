"""Every decision is an event with a reason: metrics count this one stream, tests read it.

What `explain` shows comes with a request's answer (`Usage.sources`), not from here.

Emitters call an `EventSink`; a sink never raises and never blocks. Keys are hex, cut to 16 digits:
enough to join on, never enough to look a block up.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from workmem.core.outcomes import MissReason, SourceRun, TierName


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """Base of all events."""


class BlockAdmitted(Event, frozen=True, kw_only=True):
    """A page became resident in a tier."""

    tier: TierName
    key: str
    page_bytes: int


class BlockEvicted(Event, frozen=True, kw_only=True):
    """A page left a tier to make room."""

    tier: TierName
    key: str
    reason: str


class BlockPromoted(Event, frozen=True, kw_only=True):
    """Pages arrived in a tier nearer to the accelerator; `page_bytes` is the size of each."""

    source: TierName
    target: TierName
    blocks: int
    page_bytes: int
    seconds: float


class BlockQuarantined(Event, frozen=True, kw_only=True):
    """A copy failed its check and was taken out of service (rule R6)."""

    tier: TierName
    key: str
    reason: MissReason


class NamespacePurged(Event, frozen=True, kw_only=True):
    """A tenant's or an epoch's blocks left service for good (rule R9). `root` is cut to 16 digits."""

    root: str
    blocks: int


class BoundReached(Event, frozen=True, kw_only=True):
    """A queue, pool, lease table or other bound was hit (rule R10). `name` is stable, dotted."""

    name: str
    limit: int
    detail: str = ""


class TierStateChanged(Event, frozen=True, kw_only=True):
    """A tier tripped, could not be opened, is given up and opened anew, or came back."""

    tier: TierName
    state: str
    """"error", "draining", "rebuilding" or "ok"."""
    reason: str


class RequestAdmitted(Event, frozen=True, kw_only=True):
    """A request starts: its whole growth is committed."""

    request_id: str
    prompt_tokens: int
    committed_blocks: int
    queued_s: float


class RequestPreempted(Event, frozen=True, kw_only=True):
    """A running request gave way and will resume with nothing lost."""

    request_id: str
    by: str
    reason: str


class RequestFinished(Event, frozen=True, kw_only=True):
    """A request ended; `sources` account for every prompt token."""

    request_id: str
    finish_reason: str
    sources: tuple[SourceRun, ...]
    completion_tokens: int
    queued_s: float
    ttft_s: float
    total_s: float


class RequestSplit(Event, frozen=True, kw_only=True):
    """It was decided whether one server computes a request's prompt and another one answers it."""

    request_id: str
    is_split: bool
    reason: str
    fallback: str
    """What failed, where it was to be split and was not; else empty."""


class RequestMoved(Event, frozen=True, kw_only=True):
    """The server of a generation died, and another one was asked, or none could be."""

    request_id: str
    outcome: str


class RoleChanged(Event, frozen=True, kw_only=True):
    """A server behind the gateway begins to change what it does."""

    server: str
    role: str
    by: str


EventSink = Callable[[Event], None]


def discard(event: Event) -> None:
    """The sink that keeps nothing."""
    del event
