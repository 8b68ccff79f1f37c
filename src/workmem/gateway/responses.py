"""`/v1/responses`: OpenAI's Responses API, with the state that it keeps on the server."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from workmem.core.errors import ClientError, ContextTooLong
from workmem.gateway.asking import ask, read_wire, render
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.failures import Refusal, json_response
from workmem.gateway.generation import Service
from workmem.gateway.response_reply import ResponseReply
from workmem.gateway.response_store import ResponseStore, StoredResponse
from workmem.gateway.sse import EventStream
from workmem.prompt.dialects.responses import RESPONSES
from workmem.prompt.responses import ResponsesRequest
from workmem.prompt.responses_chat import (
    PlacedItem,
    as_chat,
    placed_input,
    read_request,
    reference_id,
    stored_item,
)

_LISTED_MAX = 100
_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
}
"""Fields of a chat that the Responses API calls otherwise."""


async def create_response(exchange: Exchange) -> Answer:
    """`POST /v1/responses`, whole or streamed."""
    wire = read_wire(exchange, RESPONSES)
    request = read_request(wire.body)
    context = _context(exchange, request)
    translation = as_chat(wire.body, request, context.items)
    translation.left_out[:] = [
        msgspec.structs.replace(left, path=wire.canonical.client_path(left.path))
        for left in translation.left_out
    ]
    # A request that brings only what is new is compared with earlier ones as what it means.
    meant = {**wire.body, "input": [placed.item for placed in context.items]} if context.parent else None
    answer_id = f"resp_{uuid.uuid4().hex}"
    with _in_client_words():
        asked = await ask(
            exchange,
            wire,
            translation.chat,
            answer_id=answer_id,
            origins=translation.origins,
            passages=translation.passages,
            meant=meant,
        )

    def keep(body: dict[str, Any]) -> None:
        if request.store is False:
            return
        items = [stored_item(placed.item, uuid.uuid4().hex) for placed in context.given]
        _store(exchange).put(exchange.tenant, answer_id, body=body, input_items=items, parent=context.parent)

    reply = ResponseReply(asked, request, wire.body, translation, keep)
    if request.stream:
        return EventStream(reply.events(), asked.service.request_timeout_s, failed=reply.failed)
    return json_response(await reply.whole())


async def count_input_tokens(exchange: Exchange) -> Answer:
    """`POST /v1/responses/input_tokens`: how many tokens the prompt of a request has."""
    service: Service = state_of(exchange.request, "service")
    wire = read_wire(exchange, RESPONSES)
    # Which model counts is no question where one is served.
    body = dict(wire.body)
    if body.get("model") is None:
        body["model"] = service.engine.info.name
    request = read_request(body)
    translation = as_chat(body, request, _context(exchange, request).items)
    with _in_client_words():
        ready = await render(
            service,
            translation.chat,
            tenant=exchange.tenant,
            origins=translation.origins,
            passages=translation.passages,
        )
    count = len(ready.read.rendered.token_ids)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def get_response(exchange: Exchange) -> Answer:
    """`GET /v1/responses/{id}`."""
    if exchange.request.query_params.get("stream", "false") == "true":
        text = "A response is streamed where it is made: get it without stream."
        raise Refusal(400, text, code="unsupported_parameter", param="stream")
    return Response(_found(exchange).body, media_type="application/json")


async def delete_response(exchange: Exchange) -> Answer:
    """`DELETE /v1/responses/{id}`."""
    gone = _found(exchange)
    _store(exchange).delete(exchange.tenant, gone.id)
    return json_response({"id": gone.id, "object": "response", "deleted": True})


async def list_input_items(exchange: Exchange) -> Answer:
    """`GET /v1/responses/{id}/input_items`: its whole context, newest first unless `order=asc`."""
    found, query = _found(exchange), exchange.request.query_params
    order, after, given = query.get("order", "desc"), query.get("after"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        text = f"order is {order[:20]!r}: choose one of 'asc', 'desc'."
        raise Refusal(400, text, code="invalid_value", param="order")
    if not given.isdecimal() or len(given) > 6 or not 1 <= int(given) <= _LISTED_MAX:
        text = f"limit is {given[:20]!r}: send a number from 1 to {_LISTED_MAX}."
        raise Refusal(400, text, code="invalid_value", param="limit")
    items = [placed.item for placed in found.context_before()]
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise Refusal(
                400, f"after names no item here: {after[:128]!r}.", code="invalid_value", param="after"
            )
        items = items[ids.index(after) + 1 :]
    page = items[: int(given)]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )


def _store(exchange: Exchange) -> ResponseStore:
    return state_of(exchange.request, "responses")


def _found(exchange: Exchange) -> StoredResponse:
    response_id: str = exchange.request.path_params["id"]
    found = _store(exchange).find(exchange.tenant, response_id)
    if found is None:
        text = f"Response with id {response_id[:128]!r} not found."
        raise Refusal(404, text, code="response_not_found", param="response_id")
    return found


class _Context(NamedTuple):
    """What a request goes on from, and what it adds."""

    parent: StoredResponse | None
    given: list[PlacedItem]

    @property
    def items(self) -> list[PlacedItem]:
        """All of it, in order."""
        before = [] if self.parent is None else self.parent.context()
        return before + self.given


def _context(exchange: Exchange, request: ResponsesRequest) -> _Context:
    given = [_held(exchange, placed) for placed in placed_input(request)]
    return _Context(_previous(exchange, request), given)


def _previous(exchange: Exchange, request: ResponsesRequest) -> StoredResponse | None:
    response_id = request.previous_response_id
    if response_id is None:
        return None
    found = _store(exchange).find(exchange.tenant, response_id)
    if found is None:
        text = f"Previous response with id {response_id[:128]!r} not found: send the whole history as input."
        raise Refusal(400, text, code="previous_response_not_found", param="previous_response_id")
    return found


def _held(exchange: Exchange, placed: PlacedItem) -> PlacedItem:
    """The item itself, where `placed` refers to one."""
    item_id = reference_id(placed.item)
    if item_id is None:
        return placed
    found = _store(exchange).find_item(exchange.tenant, item_id)
    if found is None:
        text = f"Item with id {item_id[:128]!r} not found: send the item itself."
        raise Refusal(400, text, code="item_not_found", param=f"{placed.path}.id")
    return found


@contextmanager
def _in_client_words() -> Generator[None]:
    """What is wrong is told by this API's names."""
    try:
        yield
    except ClientError as error:
        if error.param is not None:
            error.param = _PARAMS.get(error.param, error.param)
        elif isinstance(error, ContextTooLong):
            error.param = "input"
        raise
