"""Which requests there were, and what became of each span of their prompts."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Any

import msgspec
from starlette.requests import Request

from workmem.core.generation import Caller
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.failures import Refusal, json_response
from workmem.gateway.keys import ApiKeys
from workmem.index.history import PromptHistory


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
    """`GET /debug/requests?n=20`."""
    only_operators(exchange.request)
    given = exchange.request.query_params.get("n", "20")
    if not given.isdecimal() or len(given) > 6:
        raise Refusal(400, f"n must be a count, not {given[:20]!r}.", code="invalid_value")
    log: RequestLog = state_of(exchange.request, "request_log")
    visible = [record for record in log.latest(10**6) if may_see(exchange, record)]
    return json_response({"object": "list", "data": visible[: int(given)]})


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
    body: Any = found[0] if len(found) == 1 else {"object": "list", "data": found}
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


def is_local(request: Request) -> bool:
    """Whether the caller is on this machine."""
    try:
        address = ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
