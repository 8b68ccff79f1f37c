"""From the fields of a request to `SamplingParams`, refusing what cannot be honoured."""

from __future__ import annotations

from typing import Any

import msgspec

from workmem.core.errors import ClientError
from workmem.core.generation import SamplingParams
from workmem.prompt.openai import (
    INT64_MAX,
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Sampling,
)

ANY_OBJECT = '{"type":"object"}'


def chat_sampling(request: ChatRequest, forced_schema: dict[str, Any] | None = None) -> SamplingParams:
    """Sampling of a chat. `forced_schema` (a forced tool call) takes the place of `response_format`."""
    if request.top_logprobs is not None and not request.logprobs:
        raise ClientError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    max_tokens = request.max_completion_tokens
    params = _shared(request, request.max_tokens if max_tokens is None else max_tokens)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    schema = params.json_schema if forced_schema is None else _as_text(forced_schema)
    return msgspec.structs.replace(params, logprobs=logprobs, json_schema=schema)


def completion_sampling(request: CompletionRequest) -> SamplingParams:
    """Sampling of a text completion. Refuses `echo`, `suffix` and `best_of` above `n`."""
    if request.echo:
        raise ClientError("echo is not supported: send echo=false.", param="echo")
    if request.suffix:
        raise ClientError(
            "suffix is not supported: this server completes, it does not infill.", param="suffix"
        )
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise ClientError(
            f"best_of={request.best_of} is not supported: it may not exceed n.", param="best_of"
        )
    # The legacy endpoint's own default; without it a bare prompt would run to the engine's bound.
    params = _shared(request, 16 if request.max_tokens is None else request.max_tokens)
    return msgspec.structs.replace(params, logprobs=request.logprobs)


def seed_of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Sampling of choice number `choice`: the same request gives the same set of answers again."""
    if params.seed is None or choice == 0:
        return params
    seed = params.seed + choice
    return msgspec.structs.replace(params, seed=seed if seed <= INT64_MAX else seed - 2 * INT64_MAX - 2)


def _shared(request: Sampling, max_tokens: int | None) -> SamplingParams:
    if request.logit_bias:
        raise ClientError("logit_bias is not supported: leave it out.", param="logit_bias")
    stop = request.stop
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        seed=request.seed,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        max_tokens=max_tokens,
        ignore_eos=bool(request.ignore_eos),
        json_schema=_schema(request),
    )


def _schema(request: Sampling) -> str | None:
    match request.response_format:
        case JsonObjectFormat():
            return ANY_OBJECT
        case JsonSchemaFormat(json_schema=wanted):
            return ANY_OBJECT if wanted.schema_ is None else _as_text(wanted.schema_)
        case _:
            return None


def _as_text(schema: dict[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
