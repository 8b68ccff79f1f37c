"""Who is calling: tenant, workflow, agent and session, from what clients already send.

First match wins. The tenant comes from the API key alone (or, where no key is configured, from a
header set by a trusted proxy), never from the body: it decides who may share KV, while everything
else here is advice that can cost time but never correctness.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from workmem.core.generation import Caller

NAME_CHARS_MAX = 128

# Ours, then the common ones, then those of single clients and routers.
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
    "x-litellm-session-id",
    "x-smg-routing-key",
)
_AGENT_HEADERS = ("x-workmem-agent", "x-claude-code-agent-id", "x-openclaw-agent-id")
_PARENT_HEADERS = (
    "x-workmem-parent",
    "x-parent-session-id",
    "x-claude-code-parent-agent-id",
    "x-dynamo-parent-session-id",
)
_WORKFLOW_HEADERS = ("x-workmem-workflow",)
_SESSION_FIELDS = (
    "session_id",
    "session",
    "conversation_id",
    "thread_id",
    "contextId",
    "lifecycle_id",
)
_AGENT_FIELDS = ("agent", "agent_id", "agent_name", "agent_type")
_PARENT_FIELDS = ("parent", "parent_session_id", "parent_agent_id", "parent_program_id", "parent_thread_id")
_WORKFLOW_FIELDS = ("workflow", "workflow_id", "program_id", "run_id", "task_id", "join_group")

_RUNTIME = re.compile(r"^\W*Runtime: agent=([^|\s]{1,128}) \| (?:session=([^|\s]{1,128}))?", re.MULTILINE)
_RUNTIME_WITHIN = 65_536
"""Characters of a message that are searched for OpenClaw's line."""


def identify(headers: Mapping[str, str], body: Mapping[str, Any], *, tenant: str) -> Caller:
    """The caller as far as the wire tells; `session` is empty where it must be inferred.

    `headers` has lower-case names. A trace (`traceparent`) names a workflow and not a session: one trace may
    span several agents, and many clients open one per request. So do `user` and
    `safety_identifier`: a person runs many sessions.
    """
    hints = _hints(body)
    trace = _trace_id(headers.get("traceparent", ""))
    session = (
        _header(headers, _SESSION_HEADERS)
        or _field(hints, _SESSION_FIELDS)
        or _first(_name(body.get(field)) for field in ("session_id", "prompt_cache_key", "conversation"))
        or _name(_object(body.get("conversation")).get("id"))
    )
    agent = _header(headers, _AGENT_HEADERS) or _field(hints, _AGENT_FIELDS)
    if not session and not agent:
        agent, session = _of_runtime_line(body)
    workflow = (
        _header(headers, _WORKFLOW_HEADERS)
        or _field(hints, _WORKFLOW_FIELDS)
        or trace
        or _name(body.get("safety_identifier"))
        or _name(body.get("user"))
    )
    parent = _header(headers, _PARENT_HEADERS) or _field(hints, _PARENT_FIELDS)
    return Caller(tenant=tenant, workflow=workflow, agent=agent, session=session, parent=parent, trace=trace)


def _hints(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects in which clients say who they are, in the order in which they are believed."""
    xargs = _object(body.get("vllm_xargs"))
    params = _object(body.get("kv_transfer_params"))
    return [
        _object(body.get("workmem")),
        _object(body.get("metadata")),
        _claude_user(body),
        _object_or_json(xargs.get("agentic_context")),
        _object(body.get("agent_hint")),
        _object(xargs.get("tokencake")),
        _object(params.get("workmem")),
        _object(body.get("client_metadata")),
        _object(_object(body.get("nvext")).get("agent_hints")),
    ]


def _first(names: Iterable[str]) -> str:
    return next((name for name in names if name), "")


def _field(hints: Iterable[Mapping[str, Any]], fields: tuple[str, ...]) -> str:
    return _first(_name(hint.get(field)) for hint in hints for field in fields)


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


def _object_or_json(value: Any) -> dict[str, Any]:
    """An object, or JSON text of one."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return _object(value)


_CLAUDE_USER = re.compile(r"_session_([0-9a-fA-F-]{8,64})$")


def _claude_user(body: Mapping[str, Any]) -> dict[str, Any]:
    """`metadata.user_id` as Claude Code sends it: JSON text that holds a `session_id`, or text that ends with one."""
    user_id = _object(body.get("metadata")).get("user_id")
    if isinstance(user_id, str) and (found := _CLAUDE_USER.search(user_id)):
        return {"session_id": found[1]}
    return _object_or_json(user_id)


def _of_runtime_line(body: Mapping[str, Any]) -> tuple[str, str]:
    """Agent and session that OpenClaw writes into its first messages; empty where there is no such line."""
    messages = body.get("messages")
    for message in messages[:3] if isinstance(messages, list) else ():
        content = _object(message).get("content")
        parts: list[Any] = content if isinstance(content, list) else [content]
        for part in parts:
            text = _object(part).get("text") if isinstance(part, dict) else part
            if isinstance(text, str) and (found := _RUNTIME.search(text, 0, _RUNTIME_WITHIN)):
                return _name(found[1]), _name(found[2])
    return "", ""


def _trace_id(traceparent: str) -> str:
    """The trace id of a W3C `traceparent`, or nothing."""
    parts = traceparent.strip().split("-")
    if len(parts) < 4 or len(parts[1]) != 32 or set(parts[1]) == {"0"}:
        return ""
    return parts[1] if all(char in "0123456789abcdef" for char in parts[1]) else ""
