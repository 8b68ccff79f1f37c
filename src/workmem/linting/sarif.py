"""A report as SARIF 2.1.0, which code hosts and editors show beside the lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from workmem import __version__
from workmem.linting.report import Loss, Report
from workmem.prompt.causes.cause import KINDS

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(report: Report) -> dict[str, Any]:
    """The log. Each loss is a result at the line of its request, with the place in the body as its logical location."""
    names = sorted({loss.cause for loss in report.losses})
    index = {name: number for number, name in enumerate(names)}
    driver = {
        "name": "workmem lint",
        "version": __version__,
        "rules": [_rule(name) for name in names],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(loss, index[loss.cause]) for loss in report.losses],
        "properties": {
            "promptTokens": report.prompt_tokens,
            "cachedTokens": report.cached_tokens,
            "canonicalCachedTokens": report.canonical_cached_tokens,
            "tokensBy": report.tokens_by,
        },
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(name: str) -> dict[str, Any]:
    kind = KINDS[name]
    return {
        "id": name,
        "shortDescription": {"text": name.replace("_", " ")},
        "fullDescription": {"text": kind.why},
        "help": {"text": kind.fix},
        "defaultConfiguration": {"level": "warning"},
    }


def _result(loss: Loss, rule_index: int) -> dict[str, Any]:
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {"uri": _uri(loss.file)},
            "region": {"startLine": loss.line},
        }
    }
    if loss.path:
        location["logicalLocations"] = [{"fullyQualifiedName": loss.path, "kind": "member"}]
    return {
        "ruleId": loss.cause,
        "ruleIndex": rule_index,
        "level": "warning",
        "message": {
            "text": f"{loss.what} {loss.tokens} tokens were computed again; compared with {loss.compared_with}."
        },
        "locations": [location],
        "properties": {"tokensLost": loss.tokens, "also": list(loss.also)},
    }


def _uri(file: str) -> str:
    path = Path(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
