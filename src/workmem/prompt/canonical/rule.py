"""What a rule is, and what is told of it where it changed something."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from workmem.core.generation import Span
from workmem.prompt.dialects.places import Dialect

Kind = Literal["lossless", "model_visible"]
_HEAD = re.compile(r"^\w+\[\d+\]")


class Applied(NamedTuple):
    """A rule that changed something in a body."""

    rule: str
    paths: tuple[str, ...]
    """What it changed, in the client's own paths."""
    moved: Mapping[str, str] = {}
    """Entries that stand elsewhere now: from the path here (`tools[0]`) to the one before the rule (`tools[3]`)."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which prompts that mean the same differ, and how it is undone."""

    name: str
    kind: Kind
    """lossless: the same JSON meaning, though token ids may change. model_visible: the model reads other words."""
    default: bool
    """Whether it is on unless somebody says otherwise; no model_visible one is."""
    what: str
    """What it does."""
    why: str
    """What breaks a prefix without it."""
    fix: str
    """What the client can do itself."""
    apply: Callable[[dict[str, Any], Dialect], Applied | None]
    """Changes the body, and says what; None where there was nothing to change. It passes over whatever is ill-formed."""


class Canonical(NamedTuple):
    """A body after its rules."""

    body: dict[str, Any]
    applied: tuple[Applied, ...] = ()
    moved: Mapping[str, str] = {}
    """Entries that stand elsewhere in the client's body: from `tools[0]` here to `tools[3]` there."""

    @property
    def fields(self) -> frozenset[str]:
        """Fields of the body that were changed."""
        return frozenset(
            re.split(r"[.\[]", path, maxsplit=1)[0] for one in self.applied for path in one.paths
        )

    @property
    def counts(self) -> dict[str, int]:
        """How many places each rule changed, for those that did."""
        return {one.rule: len(one.paths) for one in self.applied}

    def client_path(self, path: str) -> str:
        """The client's own path of what stands at `path` here."""
        return moved_back(path, self.moved)

    def in_client_words(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """`spans` with the client's own paths."""
        if not self.moved:
            return tuple(spans)
        return tuple(Span(self.client_path(span.path), span.start, span.end) for span in spans)


def moved_back(path: str, moved: Mapping[str, str]) -> str:
    """`path` as it was before entries moved."""
    head = _HEAD.match(path) if moved else None
    if head is None:
        return path
    return moved.get(head[0], head[0]) + path[head.end() :]
