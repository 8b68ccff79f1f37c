"""The two bodies of a split request: the prompt alone, and the client's own with word of what was computed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

GENERATIONS = ("/v1/chat/completions", "/v1/completions")
"""Paths that generate from a prompt and change nothing."""
PARAMS = "kv_transfer_params"

# Not needed to compute a prompt, forbidden with one token, or meant for the decode server; none of them changes the prompt.
_DROPPED = frozenset(
    [
        "stream",
        "stream_options",
        "n",
        "best_of",
        "logprobs",
        "top_logprobs",
        "response_format",
        "parallel_tool_calls",
        "min_tokens",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "json_schema",
        "regex",
        "ebnf",
        "grammar",
        "kv_hints",
    ]
)
_OF_PROMPT = ("prompt_logprobs", "prompt_logprob_token_ids")
_HINTS = ("workmem", "kv_hints")
"""Within `kv_transfer_params`: what is to be kept is said to the server that the session comes back to."""
_LIMITS = ("max_tokens", "max_completion_tokens")


def why_whole(path: str, body: Mapping[str, Any]) -> str:
    """Why a request cannot be split; empty where it can."""
    if path not in GENERATIONS:
        return "other_endpoint"
    if path.endswith("chat/completions"):
        is_single = isinstance(body.get("messages"), list)
    else:
        is_single = _is_single(body.get("prompt"))
    if not is_single:
        return "no_single_prompt"
    if any(body.get(name) in (0, 1) for name in _LIMITS):
        return "one_token"
    # What they ask for is computed with the prompt, by whoever answers.
    is_answered = any(body.get(name) for name in ("echo", "use_beam_search", "suffix"))
    # Their zero and their empty list ask for something too.
    if is_answered or any(body.get(name) is not None for name in _OF_PROMPT):
        return "prompt_is_answered"
    extension = body.get("workmem")
    if isinstance(extension, dict) and extension.get("reuse") is False:
        return "reuse_off"
    if PARAMS in body and not _is_open(body[PARAMS]):
        return "client_params"
    return ""


def prefill_body(body: bytes) -> bytes:
    """The body that has the same prompt computed and one token made of it. What makes the prompt keeps its bytes."""
    fields = _fields(body)
    limits = [name for name in _LIMITS if name in fields] or ["max_tokens"]
    for name in _DROPPED:
        fields.pop(name, None)
    if fields.get("tool_choice", b'"auto"') not in (b'"auto"', b'"none"', b"null"):
        # A forced call costs a grammar. Without a word, vLLM would take it for "auto", which it refuses by default.
        fields["tool_choice"] = b'"none"'
    if PARAMS in fields:
        params = _fields(fields[PARAMS])
        if kept := {name: value for name, value in params.items() if name not in _HINTS}:
            fields[PARAMS] = _joined(kept)
        elif params:
            del fields[PARAMS]
    return _joined(fields | {"stream": b"false"} | dict.fromkeys(limits, b"1"))


def with_handoff(body: bytes, tokens: int, wait_s: float) -> bytes:
    """The client's body and `kv_transfer_params.workmem.handoff` in it; everything else keeps its bytes."""
    handoff = {"tokens": tokens, "wait_s": wait_s}
    fields = _fields(body)
    if PARAMS not in fields:
        added = msgspec.json.encode({PARAMS: {"workmem": {"handoff": handoff}}})
        # Before the last brace; `_fields` has shown that there is one, and something before it.
        return body[: body.rindex(b"}")].rstrip() + b"," + added[1:]
    params: dict[str, Any] = msgspec.json.decode(fields[PARAMS])
    merged = params | {"workmem": (params.get("workmem") or {}) | {"handoff": handoff}}
    return _joined(fields | {PARAMS: msgspec.json.encode(merged)})


def is_repeatable(body: Mapping[str, Any]) -> bool:
    """Whether asking again gives the same text: one choice, and greedy or with a seed."""
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1) or body.get("use_beam_search"):
        return False
    seed, temperature = body.get("seed"), body.get("temperature")
    has_seed = isinstance(seed, int) and not isinstance(seed, bool)
    is_greedy = (
        isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
    )
    return has_seed or is_greedy


def exact_tokens(body: Mapping[str, Any]) -> int | None:
    """Prompt tokens where the client sent ids; None where only the server can tell."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt:
        ids: Any = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], list) else prompt
        return len(ids) if ids and isinstance(ids[0], int) else None
    return None


def _is_single(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    return isinstance(prompt[0], int) or len(prompt) == 1


def _is_open(params: Any) -> bool:
    """Whether word of ours can be added: an object, in which the client says nothing of a handoff itself."""
    if not isinstance(params, dict):
        return False
    ours = params.get("workmem")
    return ours is None or (isinstance(ours, dict) and "handoff" not in ours)


def _fields(body: bytes) -> dict[str, bytes]:
    """The values of the object in `body`, as they are written."""
    return {name: bytes(raw) for name, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()}


def _joined(fields: Mapping[str, bytes]) -> bytes:
    inner = b",".join(msgspec.json.encode(name) + b":" + value for name, value in fields.items())
    return b"{" + inner + b"}"
