"""Which requests there were, and what became of each span of their prompts."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Any

import msgspec
from starlette.requests import Request

from workmem.core.generation import Caller
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.explainer import Explainer
from workmem.gateway.failures import Refusal, json_response
from workmem.gateway.keys import ApiKeys
from workmem.gateway.recent_requests import Kept
from workmem.index.history import PromptHistory

EXPLAIN_HEADER = "x-workmem-explain"
"""Of a request: "1" asks for it. Of an answer: JSON."""


class RequestRecord(msgspec.Struct, frozen=True):
    """A request as listed. `id` is the one in the answer's body, `prompts` those the engine saw."""

    id: str
    request_id: str
    prompts: tuple[str, ...]
    caller: Caller
    created: int


class RequestLog:
    """The last `records_max` requests, by the id in the answer and by `x-request-id`."""

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._by_id: OrderedDict[str, RequestRecord] = OrderedDict()
        self._by_request_id: OrderedDict[str, str] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        """Remember `record`; a reused `x-request-id` names the newest."""
        self._by_id[record.id] = record
        self._by_request_id[record.request_id] = record.id
        self._by_request_id.move_to_end(record.request_id)
        for table in (self._by_id, self._by_request_id):
            while len(table) > self._records_max:
                table.popitem(last=False)

    def find(self, any_id: str) -> RequestRecord | None:
        """The request known under `any_id`: of the answer, of the header, or of one of its prompts."""
        stem, _, suffix = any_id.rpartition("-")
        for candidate in (any_id, stem if suffix.isdecimal() else any_id):
            record = self._by_id.get(self._by_request_id.get(candidate, candidate))
            if record is not None:
                return record
        return None

    def latest(self, n: int) -> list[RequestRecord]:
        """Newest first."""
        return list(reversed(self._by_id.values()))[:n]


async def list_requests(exchange: Exchange) -> Answer:
    """`GET /debug/requests?n=20`, the latest; or `?worst=20`, those that lost most tokens to a cause with a name."""
    only_operators(exchange.request)
    params = exchange.request.query_params
    log: RequestLog = state_of(exchange.request, "request_log")
    visible = [record for record in log.latest(10**6) if may_see(exchange, record)]
    if "worst" in params:
        explainer: Explainer = state_of(exchange.request, "explainer")
        found = (kept_of(explainer, record) for record in visible)
        held = [kept for kept in found if kept is not None]
        return json_response(await explainer.worst(held, _count("worst", params["worst"])))
    return json_response({"object": "list", "data": visible[: _count("n", params.get("n", "20"))]})


def _count(name: str, given: str) -> int:
    if not given.isdecimal() or len(given) > 6:
        raise Refusal(400, f"{name} must be a count, not {given[:20]!r}.", code="invalid_value")
    return int(given)


def kept_of(explainer: Explainer, record: RequestRecord) -> Kept | None:
    """What is remembered of the body of `record`; None where it has several prompts, or was forgotten."""
    kept = explainer.recent.named(record.prompts[0] if record.prompts else record.id)
    # An id may be used again, by another tenant too.
    return kept if kept is not None and kept.space == record.caller.tenant else None


async def explain_request(exchange: Exchange) -> Answer:
    """`GET /debug/requests/{id}`: the explanation, or a list of them for several prompts."""
    only_operators(exchange.request)
    any_id: str = exchange.request.path_params["id"]
    log: RequestLog = state_of(exchange.request, "request_log")
    history: PromptHistory = state_of(exchange.request, "history")
    record = log.find(any_id)
    if record is None or not may_see(exchange, record):
        raise unknown_request(any_id)
    wanted = [any_id] if any_id in record.prompts else record.prompts
    found = [explanation for prompt in wanted if (explanation := history.explain(prompt)) is not None]
    if not found:
        raise unknown_request(any_id)
    explainer: Explainer = state_of(exchange.request, "explainer")
    told = [
        msgspec.to_builtins(one) | await explainer.told(kept_of(explainer, record) if number == 0 else None)
        for number, one in enumerate(found)
    ]
    body: Any = told[0] if len(told) == 1 else {"object": "list", "data": told}
    return json_response(body)


def unknown_request(any_id: str) -> Refusal:
    """404 for an id that no remembered request has."""
    text = f"No request {any_id[:128]!r} is remembered; the latest are at /debug/requests."
    return Refusal(404, text, code="request_not_found")


def may_see(exchange: Exchange, record: RequestRecord) -> bool:
    """With keys, a tenant sees its own requests only: prompts are told apart by who pays for them."""
    keys: ApiKeys = state_of(exchange.request, "keys")
    return not keys.is_required or record.caller.tenant == exchange.tenant


def only_operators(request: Request) -> None:
    """Refuse others: without keys, only this machine may look; with keys, the boundary has checked one."""
    keys: ApiKeys = state_of(request, "keys")
    if keys.is_required or is_local(request):
        return
    text = "Explanations are shown to this machine only, unless server.api_key_file is set."
    raise Refusal(403, text, code="forbidden")


def explain_in_header(exchange: Exchange, explainer: Explainer, kept: Kept | None) -> None:
    """Have the answer carry the cause in `x-workmem-explain`, where that is allowed, asked for, and may be seen.

    It is the same right as for `/debug`, and not a matter of course: what was reused tells what others asked before.
    """
    request = exchange.request
    keys: ApiKeys = state_of(request, "keys")
    if kept is None or not explainer.gives_header or request.headers.get(EXPLAIN_HEADER) != "1":
        return
    if not keys.is_required and not is_local(request):
        return

    async def put() -> None:
        exchange.headers[EXPLAIN_HEADER] = await explainer.in_a_line(kept)

    exchange.on_answer = put


def is_local(request: Request) -> bool:
    """Whether the caller is on this machine."""
    try:
        address = ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
