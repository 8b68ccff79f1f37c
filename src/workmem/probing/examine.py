"""All checks of a server, in the order in which each learns from the ones before."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from workmem.core.errors import ClientError
from workmem.probing import about
from workmem.probing.caching import caching
from workmem.probing.findings import Finding, Verdict, ok, unknown
from workmem.probing.isolation import hashing, salt
from workmem.probing.probe import Plan, Probe, Spent
from workmem.probing.rounds import rounds
from workmem.probing.server import Refused, Server
from workmem.probing.thinking import thinking
from workmem.probing.tools import tools

_OF_REUSE: tuple[tuple[str, Callable[[Probe], list[Finding]]], ...] = (
    ("rounds", rounds),
    ("tools", tools),
    ("salt", salt),
)
"""They measure reuse, and tell nothing where none is seen."""
Step = Callable[[str], None]


class Target(NamedTuple):
    """What was found without spending a token."""

    server: Server
    model: str
    context: int
    apis: tuple[str, ...]
    kind: str


class Examined(NamedTuple):
    """The report, and what it cost."""

    findings: list[Finding]
    requests: int
    prompt_tokens: int
    generated_tokens: int


def look(server: Server, model: str = "") -> Target:
    """Who answers, and with what. Raises ClientError where it serves no chats, or where no model can be named."""
    models = about.served(server)
    names = about.api_names(server)
    if about.api_of(names) is None:
        text = f"{server.url} has neither {about.PATHS['chat completions']} nor {about.PATHS['messages']}; check the URL"
        raise ClientError(text)
    listed = {str(one.get("id")): one for one in models}
    if not model:
        if not listed:
            raise ClientError(
                f"{server.url} lists no models at /v1/models: name one with --model, or a key with --key-file"
            )
        model = next(iter(listed))
    context = about.context_of(listed.get(model, {}))
    return Target(server, model, context, tuple(names), about.kind(server, models))


def examine(target: Target, plan: Plan, *, seed: str = "", on_step: Step = lambda _: None) -> Examined:
    """Ask, check by check. `seed` makes the texts; a new one each time, or what was asked before is found again."""
    api = about.api_of(list(target.apis))
    assert api is not None
    probe = Probe(
        target.server, api, target.model, plan, seed or secrets.token_hex(8), context=target.context
    )
    probe.is_workmem = target.kind.startswith("workmem")
    findings = [
        ok("server", f"{target.kind}; model {target.model}, asked by {api.path}"),
        ok("apis", f"has {', '.join(target.apis)}"),
    ]
    findings += _checked(probe, "prefix cache", caching, on_step)
    for name, check in _OF_REUSE:
        if probe.caches:
            findings += _checked(probe, name, check, on_step)
        else:
            findings.append(unknown(name, "not asked: without reuse that can be seen it tells nothing"))
    findings += _checked(probe, "thinking in history", thinking, on_step)
    if probe.caches:
        apis: Sequence[str] = target.apis
        findings += _checked(
            probe, "usage of other APIs", lambda one: about.reporting_apis(one, list(apis)), on_step
        )
    findings += _checked(probe, "hash seed", hashing, on_step)
    findings += _checked(probe, "explained", about.told, on_step)
    return Examined(findings, probe.requests, probe.prompt_tokens, probe.generated_tokens)


def is_sound(findings: Sequence[Finding]) -> bool:
    """Whether nothing has to be mended."""
    return all(finding.verdict is not Verdict.FAIL for finding in findings)


def _checked(
    probe: Probe, name: str, check: Callable[[Probe], list[Finding]], on_step: Step
) -> list[Finding]:
    on_step(name)
    try:
        return check(probe)
    except Refused as refused:
        advice = "name a key with --key-file" if refused.status in (401, 403) else ""
        return [unknown(name, str(refused), advice)]
    except Spent:
        return [unknown(name, "not asked: what was announced is spent")]
