"""A chat on its way to the engine, whichever API it came by: read, rendered, begun."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec

from workmem.core.errors import ClientError
from workmem.core.generation import SamplingParams
from workmem.gateway.exchange import Exchange, header_map, state_of
from workmem.gateway.explain import explain_in_header
from workmem.gateway.generation import Generation, Order, Service, start
from workmem.gateway.models import require_model
from workmem.gateway.recent_requests import Kept
from workmem.gateway.transcripts import Read, keeping
from workmem.gateway.turn import Turn
from workmem.prompt.canonical.canonicalise import canonicalise
from workmem.prompt.canonical.rule import Canonical
from workmem.prompt.causes.answers import Made, MadeCall
from workmem.prompt.decode import convert, decode_json
from workmem.prompt.dialects.places import Dialect
from workmem.prompt.forced_calls import allowed_names, forced_schema, offered_names
from workmem.prompt.hint_dialects import hints_of
from workmem.prompt.messages import part_places, plain_content
from workmem.prompt.openai import ChatRequest
from workmem.prompt.prompt import Prompt
from workmem.prompt.sampling import chat_sampling


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it came, in its canonical form."""

    dialect: Dialect
    body: dict[str, Any]
    canonical: Canonical
    """What was done to `body`; its bytes as they came are those of the exchange."""
    remembers: bool = True
    """Whether turns of its history may have the tokens that were generated for them."""


class Asked(NamedTuple):
    """A chat that runs."""

    service: Service
    request: ChatRequest
    order: Order
    generation: Generation
    turns: list[Turn]
    """One for each choice."""
    canonical: dict[str, int]
    """How many places each rule changed in the client's body."""


def read_wire(exchange: Exchange, dialect: Dialect) -> Wire:
    """The request of `exchange`. Raises ClientError where it is no JSON object."""
    service: Service = state_of(exchange.request, "service")
    body = decode_json(exchange.body)
    remembers = service.rules.is_on(exchange.tenant, body)
    canonical = canonicalise(body, dialect, service.rules.of(exchange.tenant, body))
    service.metrics.canonical.count(canonical)
    exchange.client_path = canonical.client_path
    return Wire(dialect=dialect, body=canonical.body, canonical=canonical, remembers=remembers)


class Chat(NamedTuple):
    """A chat that is ready to run."""

    request: ChatRequest
    prompt: Prompt
    read: Read
    """The prompt as it is rendered, with the paths that the client knows."""


async def render(
    service: Service,
    chat: dict[str, Any],
    *,
    tenant: str,
    remembers: bool = True,
    origins: dict[str, str] | None = None,
    passages: dict[str, list[str]] | None = None,
) -> Chat:
    """Read and render `chat`, the body of a chat completion of `tenant`; `origins` and `passages` as in `Prompt`.

    `remembers` as in `Wire`.

    Raises ClientError where the request is wrong, with the path that the client knows.
    """
    with _in_client_words(origins or {}):
        request = _read(service, chat)
        paths, texts = part_places(request.messages)
        prompt = Prompt(
            messages=plain_content(chat["messages"], request.messages),
            tools=chat.get("tools") or [],
            origins=paths | (origins or {}),
            passages=texts | (passages or {}),
            template_kwargs=request.chat_template_kwargs,
        )
        # A long chat takes milliseconds to render: other clients' streams must not wait for it.
        read = await asyncio.to_thread(
            service.transcripts.render,
            service.engine,
            prompt,
            tenant=tenant,
            remembers=remembers and request.allows_reuse,
        )
    spans = prompt.in_client_words(read.rendered.spans)
    return Chat(
        request,
        prompt,
        read._replace(rendered=msgspec.structs.replace(read.rendered, spans=spans)),
    )


@contextmanager
def _in_client_words(origins: dict[str, str]) -> Generator[None]:
    """What is wrong is told by the client's own path."""
    try:
        yield
    except ClientError as error:
        error.param = origins.get(error.param or "", error.param)
        raise


def _read(service: Service, chat: dict[str, Any]) -> ChatRequest:
    request = convert(chat, ChatRequest)
    require_model(service.engine, request.model)
    if request.functions or request.function_call is not None:
        raise ClientError("functions and function_call are gone from the API: use tools.", param="functions")
    return request


async def ask(
    exchange: Exchange,
    wire: Wire,
    chat: dict[str, Any],
    *,
    answer_id: str,
    origins: dict[str, str] | None = None,
    passages: dict[str, list[str]] | None = None,
    is_cut_to_fit: bool = False,
    meant: dict[str, Any] | None = None,
) -> Asked:
    """Start what `chat`, the body of a chat completion, asks for; `wire` is what the client sent.

    `meant` is the client's body with what the server keeps for it, where that is more than was sent.
    An answer that could be longer than the context is refused, or with `is_cut_to_fit` ended where that ends.
    Raises as `render` does, and what the engine refuses the request with.
    """
    service: Service = state_of(exchange.request, "service")
    request, prompt, read = await render(
        service,
        chat,
        tenant=exchange.tenant,
        remembers=wire.remembers,
        origins=origins,
        passages=passages,
    )
    rendered = read.rendered
    rendered = msgspec.structs.replace(rendered, spans=wire.canonical.in_client_words(rendered.spans))
    service.transcripts.count(read)
    with _in_client_words(prompt.origins):
        sampling = chat_sampling(request, forced_schema(request, prompt.tools))
    if is_cut_to_fit:
        sampling = _cut_to_fit(sampling, service.engine.info.max_context - len(rendered.token_ids))
    headers = header_map(exchange.request)
    caller = service.callers.who(
        headers,
        wire.body,
        tenant=exchange.tenant,
        model=request.model,
        history=prompt.messages,
    )
    hints = hints_of(headers, wire.body)
    calls_max = 1 if request.parallel_tool_calls is False else None
    # What must be JSON from its first character on has no thoughts before it.
    thinking = rendered.thinking if sampling.json_schema is None else "none"
    fresh_turn = partial(
        Turn, offered_names(request), calls_max=calls_max, allowed=allowed_names(request), thinking=thinking
    )
    order = Order(
        id=answer_id,
        request_id=exchange.request_id,
        created=int(time.time()),
        prompts=[rendered],
        n=request.n or 1,
        sampling=sampling,
        caller=caller,
        priority=-hints.priority if request.priority is None else request.priority,
        reuse=request.allows_reuse,
        handoff=request.handoff,
        hints=hints,
        keep=keeping(service.transcripts, read, fresh_turn),
    )
    kept = _remember(exchange, service, wire, meant, caller.session)
    turns = [fresh_turn() for _ in range(order.n)]
    if kept is not None and order.n == 1:
        # The next request should bring the answer back as it was.
        exchange.held.callback(_note_answer, kept, turns[0])
    with _in_client_words(prompt.origins):
        generation = await start(service, order, exchange, kept)
    return Asked(service, request, order, generation, turns, wire.canonical.counts)


def _cut_to_fit(sampling: SamplingParams, room: int) -> SamplingParams:
    if sampling.max_tokens is not None and 0 < room < sampling.max_tokens:
        return msgspec.structs.replace(sampling, max_tokens=room)
    return sampling


def _remember(
    exchange: Exchange, service: Service, wire: Wire, meant: dict[str, Any] | None, session: str
) -> Kept | None:
    """Keep the request for explanations of what follows it, and promise its own where a header asks for that."""
    kept = service.explainer.recent.add(
        exchange.body if meant is None else msgspec.json.encode(meant),
        wire.body if meant is None else meant,
        wire.dialect,
        space=exchange.tenant,
        session=session,
        rules=service.rules.of(exchange.tenant, wire.body),
    )
    explain_in_header(exchange, service.explainer, kept)
    return kept


def _note_answer(kept: Kept, turn: Turn) -> None:
    calls = tuple(MadeCall(call.name, call.arguments, call.id) for call in turn.calls)
    kept.made = Made(turn.text, turn.thinking, calls)
