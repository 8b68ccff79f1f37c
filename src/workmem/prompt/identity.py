"""Who is calling: tenant, workflow, agent and session, from what clients already send.

First match wins. The tenant comes from the API key alone (or, where no key is configured, from a
header set by a trusted proxy), never from the body: it decides who may share KV, while everything
else here is advice that can cost time but never correctness.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from workmem.core.generation import Caller

NAME_CHARS_MAX = 128
SESSIONS_MAX = 4096
_TEXT_PIECE_CHARS = 512

# Session headers: ours, then the common ones, then those of single clients and routers.
_SESSION_HEADERS = (
    "x-workmem-session",
    "x-session-id",
    "session_id",
    "session-id",
    "x-session-affinity",
    "x-session-key",
    "x-session-token",
    "thread-id",
    "x-claude-code-session-id",
    "x-openclaw-session-key",
    "x-dynamo-session-id",
    "x-amp-thread-id",
    "x-aibrix-session-key",
)
_AGENT_HEADERS = ("x-workmem-agent", "x-claude-code-agent-id", "x-openclaw-agent-id")
_WORKFLOW_HEADERS = ("x-workmem-workflow", "x-parent-session-id", "x-dynamo-parent-session-id")
_SESSION_FIELDS = ("session_id", "session", "conversation_id", "thread_id", "contextId")
_AGENT_FIELDS = ("agent", "agent_id", "agent_name")
_WORKFLOW_FIELDS = ("workflow", "workflow_id", "program_id", "run_id")


def identify(headers: Mapping[str, str], body: Mapping[str, Any], *, tenant: str) -> Caller:
    """The caller as far as the wire tells; `session` is empty where it must be inferred.

    `headers` has lower-case names. `traceparent` names a workflow and not a session: one trace may
    span several agents, and many clients open one per request. So do `user` and
    `safety_identifier`: a person runs many sessions.
    """
    hints = [_object(body.get("metadata")), _claude_user(body), _agentic_context(body)]
    session = (
        _header(headers, _SESSION_HEADERS)
        or _first(_name(hint.get(field)) for hint in hints for field in _SESSION_FIELDS)
        or _name(body.get("session_id"))
        or _name(body.get("prompt_cache_key"))
    )
    agent = _header(headers, _AGENT_HEADERS) or _first(
        _name(hint.get(field)) for hint in hints for field in _AGENT_FIELDS
    )
    workflow = (
        _header(headers, _WORKFLOW_HEADERS)
        or _first(_name(hint.get(field)) for hint in hints for field in _WORKFLOW_FIELDS)
        or _trace_id(headers.get("traceparent", ""))
        or _name(body.get("safety_identifier"))
        or _name(body.get("user"))
    )
    return Caller(tenant=tenant, workflow=workflow, agent=agent, session=session)


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
            body = msgspec.json.encode(message, order="sorted")
            parent = hashlib.blake2b(parent + body, digest_size=16).digest()
            # Instructions alone are shared by many agents: they are nobody's history.
            if chain or _object(message).get("role") not in ("system", "developer"):
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


def with_session(caller: Caller, sessions: SessionInferrer, model: str, history: Sequence[Any]) -> Caller:
    """`caller` with a session, inferred from `history` where the client named none."""
    if caller.session:
        return caller
    return msgspec.structs.replace(caller, session=sessions.infer(f"{caller.tenant}\0{model}", history))


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


def _first(names: Any) -> str:
    return next((name for name in names if name), "")


def _header(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return _first(_name(headers.get(name)) for name in names)


def _name(value: Any) -> str:
    """A bounded, printable name; longer or odd ones are replaced by their digest."""
    if not isinstance(value, str):
        return ""
    value = value.strip()
    if len(value) <= NAME_CHARS_MAX and value.isprintable():
        return value
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _claude_user(body: Mapping[str, Any]) -> dict[str, Any]:
    """`metadata.user_id` as Claude Code sends it: JSON text that holds a `session_id`."""
    user_id = _object(body.get("metadata")).get("user_id")
    if not isinstance(user_id, str) or not user_id.startswith("{"):
        return {}
    try:
        return _object(json.loads(user_id))
    except (ValueError, RecursionError):
        return {}


def _agentic_context(body: Mapping[str, Any]) -> dict[str, Any]:
    """VLLM's agent context, as an object or as JSON text."""
    context = _object(body.get("vllm_xargs")).get("agentic_context")
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except (ValueError, RecursionError):
            return {}
    return _object(context)


def _trace_id(traceparent: str) -> str:
    """The trace id of a W3C `traceparent`, or nothing."""
    parts = traceparent.strip().split("-")
    if len(parts) < 4 or len(parts[1]) != 32 or set(parts[1]) == {"0"}:
        return ""
    return parts[1] if all(char in "0123456789abcdef" for char in parts[1]) else ""
