"""Where a template puts the tools, and what a change of their form costs."""

from __future__ import annotations

from typing import NamedTuple

from workmem.probing.asks import Reading, Tool
from workmem.probing.findings import Finding, ok, unknown, warn
from workmem.probing.probe import Probe

_QUESTION = "Say yes."
_FRONT = "a front that puts tools into one order and form (workmem does), or a client that does, saves this"


class _Scene(NamedTuple):
    """A request whose instructions are two fifths of its text, and its history the rest."""

    probe: Probe
    system: str
    history: str

    def ask(self, *tools: Tool) -> Reading:
        return self.probe.ask(self.system, f"{self.history}\n{_QUESTION}", tools=tools)


def tools(probe: Probe) -> list[Finding]:
    """Where tools stand, and whether their order and the order of their keys matter."""
    tokens = probe.middle_tokens
    scene = _Scene(probe, probe.text("tools", tokens * 0.4), probe.text("history", tokens * 0.6))
    one = Tool("read_file", probe.text("read", 60))
    two = Tool("write_file", probe.text("write", 60))
    bare, first = scene.ask(), scene.ask(one, two)
    probe.tools_id = first.id
    if bare.prompt_tokens is None or first.prompt_tokens is None:
        return [unknown("tools", "the server does not say how many tokens a prompt has")]
    added = first.prompt_tokens - bare.prompt_tokens
    if added <= 0:
        return [
            unknown(
                "tools",
                f"{added} tokens more with two tools: the template prints none",
                "this model never sees its tools",
            )
        ]
    changed = scene.ask(Tool(one.name, probe.text("changed", 60)), two)
    return [_place(probe, bare.prompt_tokens, added, changed), *_forms(scene, one, two)]


def _place(probe: Probe, bare: int, added: int, changed: Reading) -> Finding:
    cached = changed.cached or 0
    seen = f"tools take {added} tokens; {cached} of {bare} others were reused when the first tool changed"
    if probe.step * 4 > bare:
        return unknown(
            "place of tools", f"{seen}: too few for blocks of {probe.step}", "--tokens makes it longer"
        )
    if cached < 0.2 * bare:
        return ok("place of tools", f"tools_first, before instructions and history: {seen}")
    if cached < 0.7 * bare:
        return ok("place of tools", f"tools_after_instructions, before the history: {seen}")
    return warn(
        "place of tools",
        f"tools_after_history: {seen}",
        "they stand behind the conversation and are computed anew each round: they cost their "
        f"{added} tokens every time; a template that has them first saves that",
    )


def _forms(scene: _Scene, one: Tool, two: Tool) -> list[Finding]:
    """The same tools, in another order and another form."""
    probe = scene.probe
    again = scene.ask(one, two)
    tokens = again.prompt_tokens or 0
    # It was asked twice: what is gone since then was pushed out by the one in between.
    keeps_one = (again.cached or 0) < tokens // 2
    if keeps_one:
        again = scene.ask(one, two)
    most = again.cached or 0
    swapped = scene.ask(two, one)
    if keeps_one:
        scene.ask(one, two)
    keys = scene.ask(Tool(one.name, one.description, one.properties[::-1]), two)
    if keeps_one:
        scene.ask(one, two)
    more = scene.ask(one, two, Tool("list_files", probe.text("list", 60)))
    slots = warn(
        "slots",
        "a prompt was forgotten when another one came in between",
        "as many conversations at a time as it has slots keep their prefix: raise their number (llama.cpp: --parallel)",
    )
    return [
        *([slots] if keeps_one else []),
        _form(probe, "order of tools", most, swapped),
        _form(probe, "order of keys", most, keys),
        _added(tokens, most, more),
    ]


def _form(probe: Probe, check: str, most: int, reading: Reading) -> Finding:
    cached = reading.cached or 0
    seen = f"{cached} tokens were reused after a change of it, {most} without"
    if cached >= most - probe.step:
        return ok(check, f"does not matter: {seen}")
    return warn(check, f"matters: {seen}", _FRONT)


def _added(tokens: int, most: int, reading: Reading) -> Finding:
    cached = reading.cached or 0
    seen = f"{cached} of {tokens} tokens were reused when a third tool came, {most} without"
    if cached >= 0.85 * most:
        return ok("tool added", seen)
    return warn(
        "tool added",
        seen,
        "the set should stay while a conversation runs: a tool that comes late costs what stands behind the tools: have all of them from the beginning, "
        "or a front that announces new ones behind the history",
    )
