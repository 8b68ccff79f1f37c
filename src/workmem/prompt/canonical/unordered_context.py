"""Results of a search, which have no order, by their text."""

from __future__ import annotations

import re
from typing import Any

from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.dialects.places import Dialect

_NAME = "unordered_context"
_TAGS = "document|doc|memory|memory_item|search_result|result|chunk|passage|snippet|fact|item|note"
_ELEMENT = re.compile(rf"<({_TAGS})(?:\s[^<>]*)?>.*?</\1>", re.DOTALL)


def sorted_elements(text: str) -> str:
    """`text` with each run of elements of one name, with nothing but white space between them, sorted."""
    out: list[str] = []
    run: list[re.Match[str]] = []
    at = 0

    def end_run() -> None:
        nonlocal at
        if not run:
            return
        elements = sorted(match[0] for match in run)
        for match, element in zip(run, elements, strict=True):
            out.extend((text[at : match.start()], element))
            at = match.end()
        run.clear()

    for match in _ELEMENT.finditer(text):
        if run and (match[1] != run[-1][1] or text[run[-1].end() : match.start()].strip()):
            end_run()
        run.append(match)
    end_run()
    return "".join(out) + text[at:]


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    paths: list[str] = []
    for place in dialect.texts(body):
        if place.kind != "text" or place.role == "assistant":
            continue
        now = sorted_elements(place.text)
        if now != place.text:
            place.write(now)
            paths.append(place.path)
    return Applied(_NAME, tuple(paths)) if paths else None


UNORDERED_CONTEXT = Rule(
    name=_NAME,
    kind="model_visible",
    default=False,
    what=(
        f"Sorts elements that stand behind each other and are called {', '.join(f'`{tag}`' for tag in _TAGS.split('|'))} "
        "by their text, in all but the model's own words."
    ),
    why=(
        "A memory or a search gives the same results in another order each time. Where their order is their rank, "
        "the model loses it."
    ),
    fix="Sort what was found by a key of its own before it is written into the prompt.",
    apply=_apply,
)
