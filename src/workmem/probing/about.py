"""What kind of server it is, and which APIs it has. Costs few tokens or none."""

from __future__ import annotations

import urllib.parse
from typing import Any

from workmem.probing.asks import Ask, ChatApi, MessagesApi, count_of, object_of
from workmem.probing.findings import Finding, ok, unknown, warn
from workmem.probing.probe import Probe
from workmem.probing.server import Refused, Server

PATHS = {
    "chat completions": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}
_ABSENT = (404, 405, 501)


def served(server: Server) -> list[dict[str, Any]]:
    """The models that it lists."""
    listed = (server.get("/v1/models") or {}).get("data")
    return [object_of(model) for model in listed] if isinstance(listed, list) else []


def context_of(model: dict[str, Any]) -> int:
    """The longest prompt, where the list says it: as vLLM and SGLang do, or llama.cpp."""
    return (
        count_of(model.get("max_model_len")) or count_of(object_of(model.get("meta")).get("n_ctx_train")) or 0
    )


def api_names(server: Server) -> list[str]:
    """Names of those that it has, as `PATHS` has them."""
    return [name for name, path in PATHS.items() if server.status_of(path) not in _ABSENT]


def kind(server: Server, models: list[dict[str, Any]]) -> str:
    """Its name, as far as it tells."""
    listed = server.get("/debug/requests?n=1")
    if listed is not None and isinstance(listed.get("data"), list):
        health = server.get("/health") or {}
        return "workmem, in front of others" if "servers" in health else "workmem"
    owner = str(models[0].get("owned_by", "")) if models else ""
    version = (server.get("/version") or {}).get("version")
    return f"{owner or 'not named'}{f' {version}' if isinstance(version, str) else ''}"


def reporting_apis(probe: Probe, names: list[str]) -> list[Finding]:
    """Whether the other APIs report cached tokens as well."""
    said = probe.text("apis", max(200, 2 * probe.step))
    bodies: dict[str, dict[str, Any]] = {
        "responses": {"input": said, "max_output_tokens": 16, "store": False},
        "messages": MessagesApi().body("", _ask(said)),
    }
    if probe.api.name == "messages":
        del bodies["messages"]
    return [
        _reporting(probe, name, body | {"model": probe.model})
        for name, body in bodies.items()
        if name in names
    ]


def _ask(text: str) -> Ask:
    return Ask(system=text, messages=[{"role": "user", "content": "Say yes."}])


def _reporting(probe: Probe, name: str, body: dict[str, Any]) -> Finding:
    check = f"usage of {name}"
    try:
        answers = [probe.post(PATHS[name], body)[0] for _ in range(2)]
    except Refused as refused:
        return unknown(check, str(refused))
    usage = object_of(answers[-1].get("usage"))
    fresh = count_of(usage.get("input_tokens"))
    if name == "responses":
        cached, total = count_of(object_of(usage.get("input_tokens_details")).get("cached_tokens")), fresh
    else:
        cached = count_of(usage.get("cache_read_input_tokens"))
        kept = count_of(usage.get("cache_creation_input_tokens")) or 0
        total = None if fresh is None else fresh + (cached or 0) + kept
    if cached is None:
        return warn(
            check, "does not report cached tokens", "clients of this API see no hits, whatever is reused"
        )
    return ok(check, f"reports cached tokens: {cached} of {total} when a prompt came again")


def told(probe: Probe) -> list[Finding]:
    """What a workmem tells of itself: where its template put the tools, and from which tiers it reused."""
    if not probe.is_workmem or not probe.tools_id:
        return []
    found = probe.server.get(f"/debug/requests/{urllib.parse.quote(probe.tools_id, safe='')}") or {}
    spans = [object_of(span) for span in found.get("spans") or ()]
    places = [f"{span.get('path')} at token {span.get('start')}" for span in spans][:8]
    tiers = object_of(found.get("tokens_by_source"))
    if not places:
        return [
            unknown(
                "explained", "it does not explain its requests to us", "ask on its machine, or with a key"
            )
        ]
    text = f"{', '.join(places)}; tokens by source: {', '.join(f'{name} {count}' for name, count in tiers.items())}"
    return [ok("explained", text)]


def api_of(names: list[str]) -> ChatApi | MessagesApi | None:
    """By which of them the other checks ask."""
    if "chat completions" in names:
        return ChatApi()
    return MessagesApi() if "messages" in names else None
