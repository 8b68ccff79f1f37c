"""Which session a request continues, where its client does not say: the one whose history it extends."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

SESSIONS_MAX = 4096
_TEXT_PIECE_CHARS = 512
_MARKS = ("cache_control", "prompt_cache_breakpoint")
"""Set on what is newest in each turn: they are no part of what was said."""


class SessionInferrer:
    """Recognises a session by its history: a request that extends an earlier one continues it.

    Keeps one digest per remembered request, at most `sessions_max`, least recently used out first.
    """

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions_max = sessions_max
        self._by_history: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_history)

    def infer(self, scope: str, messages: Sequence[Any]) -> str:
        """Session of a request with `messages`, and remember it. `scope`: tenant and model.

        The name of a new session is a digest of its first request, so it survives a restart.
        """
        parent = hashlib.blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        chain: list[bytes] = []
        for message in messages:
            body = msgspec.json.encode(_unmarked(message), order="sorted")
            parent = hashlib.blake2b(parent + body, digest_size=16).digest()
            # Instructions alone are shared by many agents: they are nobody's history.
            if chain or _role_of(message) not in ("system", "developer"):
                chain.append(parent)
        if not chain:
            return f"inferred-{parent.hex()[:16]}" if messages else ""
        session = next((found for key in reversed(chain) if (found := self._by_history.get(key))), "")
        session = session or f"inferred-{chain[-1].hex()[:16]}"
        self._by_history[chain[-1]] = session
        self._by_history.move_to_end(chain[-1])
        while len(self._by_history) > self._sessions_max:
            self._by_history.popitem(last=False)
        return session


def history_of(body: Mapping[str, Any]) -> list[Any]:
    """What a body says, as a list that grows from turn to turn."""
    for field in ("messages", "input", "prompt"):
        value = body.get(field)
        if isinstance(value, list):
            return list(value)
        if isinstance(value, str):
            # Raw text grows in the middle of a piece: only whole pieces can come back unchanged.
            whole = len(value) // _TEXT_PIECE_CHARS * _TEXT_PIECE_CHARS
            return [value[at : at + _TEXT_PIECE_CHARS] for at in range(0, whole, _TEXT_PIECE_CHARS)] or [
                value
            ]
    return []


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _unmarked(message: Any) -> Any:
    """`message` without marks on it or on its parts."""
    if not isinstance(message, dict):
        return message
    kept = {key: value for key, value in message.items() if key not in _MARKS}
    content = kept.get("content")
    if isinstance(content, list):
        kept["content"] = [_unmarked(part) for part in content]
    return kept
