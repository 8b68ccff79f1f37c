"""Whether a salt keeps tenants apart, and what is known of how blocks are hashed."""

from __future__ import annotations

import re

from workmem.probing.findings import Finding, ok, unknown, warn
from workmem.probing.probe import Probe
from workmem.probing.server import Refused

_QUESTION = "Say yes."
_HASHING = re.compile(r'vllm:cache_config_info\{[^}]*?prefix_caching_hash_algo="([^"]+)"')


def salt(probe: Probe) -> list[Finding]:
    """Whether `cache_salt` makes the same prompt another's."""
    text = probe.text("salt", max(200, 3 * probe.step))
    try:
        probe.ask(text, _QUESTION, more={"cache_salt": f"{probe.filler.text('salt', 1)}a"})
        other = probe.ask(text, _QUESTION, more={"cache_salt": f"{probe.filler.text('salt', 1)}b"})
        same = probe.ask(text, _QUESTION, more={"cache_salt": f"{probe.filler.text('salt', 1)}b"})
    except Refused as refused:
        return [unknown("salt", f"cache_salt is not known here: {refused}")]
    if other.cached is None or same.cached is None:
        return [unknown("salt", "the server does not say what was cached")]
    seen = f"another cache_salt: {other.cached} of {other.prompt_tokens} cached, the same one: {same.cached}"
    if same.cached <= probe.head:
        return [unknown("salt", seen, "with a salt nothing is reused at all")]
    if other.cached <= probe.head + probe.step and other.cached < same.cached:
        return [ok("salt", f"keeps prompts apart: {seen}")]
    advice = "whoever guesses another's prompt sees by the time whether it was asked: give tenants servers of their own"
    if probe.is_workmem:
        advice = "workmem keeps tenants apart by their keys (server.api_key_file), and by nothing that a client says"
    return [warn("salt", f"is not heeded: {seen}", advice)]


def hashing(probe: Probe) -> list[Finding]:
    """What its metrics say of its block hashes."""
    found = _HASHING.search(probe.server.page("/metrics"))
    if found is None:
        return [unknown("hash seed", "not to be seen from outside, and of no matter to one server alone")]
    text = f"vLLM hashes blocks with {found[1]}; whether their seed is fixed is not to be seen from outside"
    return [
        unknown("hash seed", text, "where several share KV or events, start all with the same PYTHONHASHSEED")
    ]
