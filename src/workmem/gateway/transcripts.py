"""Turns that were generated here, kept so that the next prompt of their session has their very tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from workmem.core.generation import USED, Engine, KnownOutcome, KnownTurn, RenderedPrompt, text_digest
from workmem.gateway.metrics import Metrics
from workmem.gateway.turn import Turn
from workmem.prompt.prompt import Prompt
from workmem.prompt.transcripts import ReadHistory, Transcripts, TurnMeaning

TURNS_MAX, TURN_TOKENS_MAX = 16_384, 4_000_000
UNKNOWN = "unknown"
"""Outcome of a turn that was not generated here, is forgotten, or means something else now."""


class Read(NamedTuple):
    """A rendered prompt, and what an answer to it will be known by."""

    rendered: RenderedPrompt
    history: ReadHistory | None = None
    """None where nothing is to be remembered."""
    digest: bytes = b""
    """Of the rendered text."""


class TurnMemory:
    """`Transcripts` for the threads that render and the event loop that hears of answers."""

    def __init__(self, metrics: Metrics, *, turns_max: int, tokens_max: int) -> None:
        self._transcripts = Transcripts(turns_max=turns_max, tokens_max=tokens_max)
        self._lock = threading.Lock()
        self._metrics = metrics
        metrics.transcript_tokens_held.set_function(lambda: float(self._transcripts.tokens))

    def render(self, engine: Engine, prompt: Prompt, *, tenant: str, remembers: bool) -> Read:
        """Render `prompt`, with the tokens of its turns that are known if it `remembers`. For a thread: it computes."""
        if not remembers:
            return Read(_render(engine, prompt, ()))
        history = ReadHistory(f"{engine.info.fingerprint}\0{tenant}", prompt)
        with self._lock:
            known = self._transcripts.find(history)
        rendered = _render(engine, prompt, known)
        return Read(rendered, history, text_digest(rendered.text))

    def keep(self, read: Read, turn: Turn, token_ids: Sequence[int]) -> None:
        """Remember the tokens of `turn`, a finished answer to what was read."""
        if read.history is None:
            return
        meaning = TurnMeaning(turn.text, [(call.name, call.arguments) for call in turn.calls])
        key, chars = read.history.key_of_answer(meaning), len(read.rendered.text)
        with self._lock:
            self._transcripts.keep(key, prompt_chars=chars, prompt_digest=read.digest, token_ids=token_ids)

    def count(self, read: Read) -> None:
        """Count what became of the newest turn alone: older ones were the newest of an earlier request."""
        if read.history is None or not read.history.turns:
            return
        outcomes = read.rendered.known
        last = outcomes[-1] if outcomes and outcomes[-1].message == read.history.turns[-1] else None
        self._metrics.transcript_turns.labels(last.outcome if last else UNKNOWN).inc()
        if last is not None and last.outcome == USED:
            self._metrics.transcript_tokens.inc(last.tokens)


def keeping(
    memory: TurnMemory, read: Read, fresh_turn: Callable[[], Turn]
) -> Callable[[str, list[int], str], None] | None:
    """What to tell of each finished choice: its text, its tokens, and why it ended."""
    if read.history is None:
        return None

    def keep(text: str, token_ids: list[int], finish_reason: str) -> None:
        turn = fresh_turn()
        turn.take(text, finish_reason)
        memory.keep(read, turn, token_ids)

    return keep


def _render(engine: Engine, prompt: Prompt, known: Sequence[KnownTurn]) -> RenderedPrompt:
    return engine.render_chat(
        prompt.messages,
        tools=prompt.tools,
        template_kwargs=prompt.template_kwargs,
        passages=prompt.passages,
        known=known,
    )


def transcript_body(outcomes: Sequence[KnownOutcome]) -> dict[str, Any]:
    """`usage.workmem.transcript_memory`; nothing where no token id changed by it."""
    used = [outcome for outcome in outcomes if outcome.outcome == USED]
    if not used:
        return {}
    return {"transcript_memory": {"turns": len(used), "tokens": sum(outcome.tokens for outcome in used)}}
