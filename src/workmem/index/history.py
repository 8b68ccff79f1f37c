"""Why did these tokens have to be computed? The prompts of the recent past, and what each shared.

The engine knows what it found and what it missed; it does not know that a prompt was *meant* to
continue an earlier one. This history does: it holds the last prompts, finds the one a new prompt
follows, and turns "never seen" into "changed here" where that is the truth.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from workmem.core.generation import HandoffReport, Span
from workmem.core.layout import BLOCK_TOKENS
from workmem.core.outcomes import SourceRun
from workmem.index.explanation import Difference, Explanation, account, describe
from workmem.index.prefixes import PrefixTree, common_prefix

SHOWN_TOKENS = 8
"""Token ids quoted on each side of a difference."""


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """What two prompts have in common, in tokens."""

    tokens_here: int
    tokens_before: int
    shared: int
    """Of their beginnings."""


class _Prompt:
    """A prompt as held. `sources` is None until the request has finished."""

    __slots__ = (
        "approximate",
        "created",
        "difference",
        "handoff",
        "nearest_id",
        "request_id",
        "sources",
        "space",
        "spans",
        "token_ids",
    )

    def __init__(
        self, request_id: str, space: str, token_ids: array[int], spans: tuple[Span, ...], created: float
    ) -> None:
        self.request_id = request_id
        self.space = space
        self.token_ids = token_ids
        self.spans = spans
        self.created = created
        self.nearest_id: str | None = None
        self.difference: Difference | None = None
        self.sources: tuple[SourceRun, ...] | None = None
        self.approximate = False
        self.handoff: HandoffReport | None = None


class PromptHistory:
    """The latest prompts of each space (a model and a tenant: what may share KV), oldest leaving first.

    Not thread-safe: one owner calls it. Holds 4 bytes per token and one tree node per fork.
    """

    def __init__(
        self, *, prompts_max: int = 1024, tokens_max: int = 4_000_000, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self._prompts_max = prompts_max
        self._tokens_max = tokens_max
        self._block_tokens = block_tokens
        self._held: deque[_Prompt] = deque()
        self._held_tokens = 0
        self._by_id: dict[str, _Prompt] = {}
        self._trees: dict[str, PrefixTree[_Prompt]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(
        self, request_id: str, space: str, token_ids: Sequence[int], spans: tuple[Span, ...], created: float
    ) -> None:
        """Remember a prompt on its way to the engine. `created` is in Unix seconds.

        A `request_id` seen before names the new prompt from now on. Raises ValueError where `spans`
        are not ascending, disjoint and covering.
        """
        _check_spans(spans, len(token_ids))
        prompt = _Prompt(request_id, space, array("I", token_ids), spans, created)
        tree = self._trees.setdefault(space, PrefixTree())
        nearest, shared = tree.add(prompt)
        if nearest is not None:
            prompt.nearest_id = nearest.request_id
            prompt.difference = _difference(prompt, nearest, shared)
        self._held.append(prompt)
        self._held_tokens += len(prompt.token_ids)
        self._by_id[request_id] = prompt
        while len(self._held) > self._prompts_max or self._held_tokens > self._tokens_max:
            self._forget_oldest()

    def finish(
        self,
        request_id: str,
        sources: tuple[SourceRun, ...],
        *,
        approximate: bool = False,
        handoff: HandoffReport | None = None,
    ) -> None:
        """Record where the tokens came from, whether some of their KV was rounded, and how long they were waited for.

        A request no longer held is ignored.

        Fewer tokens than the prompt has are fine (a cancelled request); more raise ValueError.
        """
        prompt = self._by_id.get(request_id)
        if prompt is None:
            return
        accounted = sum(run.tokens for run in sources)
        if accounted > len(prompt.token_ids):
            raise ValueError(
                f"sources of request {request_id} account for {accounted} tokens, "
                f"but its prompt has {len(prompt.token_ids)}"
            )
        prompt.sources, prompt.approximate, prompt.handoff = sources, approximate, handoff

    def explain(self, request_id: str) -> Explanation | None:
        """Account for every prompt token of a request; None if it is not held (any more)."""
        prompt = self._by_id.get(request_id)
        if prompt is None:
            return None
        return account(
            request_id=request_id,
            created=prompt.created,
            spans=prompt.spans,
            sources=prompt.sources,
            approximate=prompt.approximate,
            handoff=prompt.handoff,
            compared_with=prompt.nearest_id,
            difference=prompt.difference,
            block_tokens=self._block_tokens,
        )

    def overlap(self, request_id: str, earlier_id: str) -> Overlap | None:
        """What a prompt has in common with an earlier one of its space; None where one of them is not held."""
        here, before = self._by_id.get(request_id), self._by_id.get(earlier_id)
        if here is None or before is None or here.space != before.space:
            return None
        count, count_before = len(here.token_ids), len(before.token_ids)
        shared = common_prefix(here.token_ids, before.token_ids, 0, min(count, count_before))
        return Overlap(tokens_here=count, tokens_before=count_before, shared=shared)

    def latest(self, n: int) -> list[str]:
        """Ids of the `n` latest prompts held, newest first."""
        ids = dict.fromkeys(prompt.request_id for prompt in reversed(self._held))
        return list(islice(ids, n))

    def _forget_oldest(self) -> None:
        prompt = self._held.popleft()
        self._held_tokens -= len(prompt.token_ids)
        if self._by_id.get(prompt.request_id) is prompt:
            del self._by_id[prompt.request_id]
        tree = self._trees[prompt.space]
        tree.forget_oldest(prompt)
        if not tree:
            del self._trees[prompt.space]


def _difference(prompt: _Prompt, nearest: _Prompt, shared: int) -> Difference | None:
    """Where `prompt` departs from `nearest`; None where one is a prefix of the other."""
    here, before = prompt.token_ids, nearest.token_ids
    if shared == len(here) or shared == len(before):
        return None
    return describe(
        token=shared,
        spans=prompt.spans,
        spans_before=nearest.spans,
        here=tuple(here[shared : shared + SHOWN_TOKENS]),
        before=tuple(before[shared : shared + SHOWN_TOKENS]),
    )


def _check_spans(spans: tuple[Span, ...], tokens: int) -> None:
    end = 0
    for span in spans:
        if span.start != end or span.end < span.start:
            raise ValueError(f"span {span.path} is [{span.start}, {span.end}) but should start at {end}")
        end = span.end
    if end != tokens:
        raise ValueError(f"spans cover {end} tokens of {tokens}")
