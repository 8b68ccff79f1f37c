"""Memory of turns: what was generated, to be found again when a client sends it back in other words.

A turn is found by everything before it: its key is a digest over the scope (model and tenant), template options, tools
and every message up to and including the turn itself, each by what it means. What a client cannot mean is left out:
how the arguments of calls are spelled, the names of call ids, white space around a text. So an entry of another
tenant, model or conversation is out of reach, and a history that was changed finds nothing from the change on.

Whoever renders still compares text: see `prompt/turn_alignment.py`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from workmem.core.generation import KnownTurn
from workmem.prompt.prompt import Prompt
from workmem.prompt.turn_alignment import call_arguments, canonical_json

_ENCODER = msgspec.json.Encoder(order="sorted")


class TurnMeaning(NamedTuple):
    """An assistant's turn as a client gets it."""

    text: str
    calls: Sequence[tuple[str, str]]
    """Name and arguments (JSON text) of each."""

    def as_message(self) -> dict[str, Any]:
        """The message that says so."""
        calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in self.calls]
        return {"role": "assistant", "content": self.text, "tool_calls": calls}


class ReadHistory:
    """A prompt's messages as digests: after each one, everything up to it."""

    def __init__(self, scope: str, prompt: Prompt) -> None:
        self._call_numbers: dict[str, int] = {}
        start = [scope, prompt.template_kwargs or {}, prompt.tools]
        self._chain = [_digest(b"", _ENCODER.encode(start))]
        for message in prompt.messages:
            self._chain.append(_digest(self._chain[-1], self._meaning(message)))
        self.turns = [
            index for index, message in enumerate(prompt.messages) if message.get("role") == "assistant"
        ]
        """Indices of the assistant's messages."""

    def key(self, index: int) -> bytes:
        """Of the history up to and including message `index`."""
        return self._chain[index + 1]

    def key_of_answer(self, answer: TurnMeaning) -> bytes:
        """Of the whole history and `answer` after it."""
        return _digest(self._chain[-1], self._meaning(answer.as_message()))

    def _meaning(self, message: Mapping[str, Any]) -> bytes:
        role = message.get("role")
        told = [
            "system" if role == "developer" else role,
            message.get("name"),
            # Texts of others are taken as they are: a template may print every space of them.
            _stripped(message.get("content")) if role == "assistant" else message.get("content"),
            [self._call(call) for call in message.get("tool_calls") or ()],
            self._number(message.get("tool_call_id")) if role == "tool" else None,
        ]
        return _ENCODER.encode(told)

    def _call(self, call: Mapping[str, Any]) -> list[Any]:
        # A call takes its number as it is made; an answer's own calls get theirs when they come back.
        name, number = (call.get("function") or {}).get("name"), call.get("id")
        if isinstance(number, str):
            self._call_numbers.setdefault(number, len(self._call_numbers))
        arguments = call_arguments(call)
        try:
            return [name, canonical_json(arguments)]
        except RecursionError:
            return [name, (call.get("function") or {}).get("arguments")]

    def _number(self, call_id: Any) -> Any:
        return self._call_numbers.get(call_id, call_id) if isinstance(call_id, str) else call_id


class Transcripts:
    """The latest generated turns, at most `turns_max` of them and `tokens_max` tokens, least recently used out first.

    Not thread-safe: one owner calls it.
    """

    def __init__(self, *, turns_max: int, tokens_max: int) -> None:
        self._turns_max = turns_max
        self._tokens_max = tokens_max
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()
        self.tokens = 0
        """Tokens of all turns held."""

    def __len__(self) -> int:
        return len(self._turns)

    def find(self, history: ReadHistory) -> list[KnownTurn]:
        """Turns of `history` that were generated here, by ascending message."""
        found: list[KnownTurn] = []
        for index in history.turns:
            key = history.key(index)
            turn = self._turns.get(key)
            if turn is not None:
                self._turns.move_to_end(key)
                ids = tuple(turn.token_ids)
                found.append(
                    KnownTurn(
                        message=index,
                        prompt_chars=turn.prompt_chars,
                        prompt_digest=turn.prompt_digest,
                        token_ids=ids,
                    )
                )
        return found

    def keep(self, key: bytes, *, prompt_chars: int, prompt_digest: bytes, token_ids: Sequence[int]) -> None:
        """Remember a turn. Of turns that mean the same, the latest is kept: its KV is the warmest."""
        if not token_ids or len(token_ids) > self._tokens_max:
            return
        self._drop(key)
        self._turns[key] = _Turn(prompt_chars, prompt_digest, array("I", token_ids))
        self.tokens += len(token_ids)
        while len(self._turns) > self._turns_max or self.tokens > self._tokens_max:
            self._drop(next(iter(self._turns)))

    def _drop(self, key: bytes) -> None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self.tokens -= len(turn.token_ids)


class _Turn(NamedTuple):
    prompt_chars: int
    prompt_digest: bytes
    token_ids: array[int]


def _digest(before: bytes, told: bytes) -> bytes:
    return hashlib.blake2b(before + told, digest_size=20).digest()


def _stripped(text: Any) -> Any:
    return text.strip() if isinstance(text, str) else text
