"""Asks a linter of prompts what it says of pairs of requests; runs in the environment of that linter.

    python prompt_linter.py NAME FOLDER [TOKENIZER]

FOLDER has 0.a.json and 0.b.json, 1.a.json and so on. Written to standard output: JSON, a list of what was said of each
pair, as (code, place).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

Said = list[tuple[str, str]]
_TIMEOUT_S = 120.0


def pairs_in(folder: Path) -> list[tuple[Path, Path]]:
    """All pairs, in order."""
    count = len(list(folder.glob("*.a.json")))
    return [(folder / f"{number}.a.json", folder / f"{number}.b.json") for number in range(count)]


def cachelint(before: Path, after: Path, tokenizer: str) -> Said:
    """Its command: the first divergence, and its findings."""
    del tokenizer
    done = _run("cachelint", "diff", "--provider", "openai", str(before), str(after))
    place = ""
    said: Said = []
    for line in done.splitlines():
        if line.startswith("First divergence: "):
            place = line.removeprefix("First divergence: ")
        elif line.startswith("  - ") and not line.startswith("  - coverage_limited"):
            said.append((line.removeprefix("  - ").split(":")[0], place))
    return said


def kvlint(before: Path, after: Path, tokenizer: str) -> Said:
    """Its command, on a log of both requests."""
    log = before.with_suffix(".jsonl")
    log.write_text(
        "".join(json.dumps(json.loads(path.read_text())) + "\n" for path in (before, after)), "utf-8"
    )
    out = before.with_suffix(".kvlint")
    _run("kvlint", "lint", str(log), "--model", tokenizer, "--format", "openai", "--json", str(out))
    report = json.loads(out.read_text())
    return [(str(one["rule_id"]), str(one.get("evidence", ""))[:120]) for one in _findings(report)]


def _findings(report: Any) -> list[dict[str, Any]]:
    """The findings, wherever its report has them."""
    if isinstance(report, list):
        return [one for item in report for one in _findings(item)]
    if not isinstance(report, dict):
        return []
    if isinstance(report.get("rule_id"), str):
        return [report]
    return [one for item in report.values() for one in _findings(item)]


def prefixguard(before: Path, after: Path, tokenizer: str) -> Said:
    """Its watch over both, and its lint of the later one."""
    del tokenizer
    from prefixguard import PrefixGuard, lint  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    guard = PrefixGuard()
    bodies = [json.loads(path.read_text()) for path in (before, after)]
    reports = [
        guard.observe(
            body["messages"][1:], system=body["messages"][0]["content"], tools=body["tools"], session="one"
        )
        for body in bodies
    ]
    body = bodies[-1]
    found = [*reports[-1].findings, *lint(system=body["messages"][0]["content"], tools=body["tools"])]
    return [(getattr(one.cause, "value", str(one.cause)), str(getattr(one, "block_id", ""))) for one in found]


def promptcachelint(before: Path, after: Path, tokenizer: str) -> Said:
    """Its recorder, then its analysis."""
    del tokenizer
    import promptcachelint as peer  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    recorder = peer.Recorder()
    for path in (before, after):
        recorder.record("openai", json.loads(path.read_text()), session_id="one")
    found: Said = []
    _codes(peer.analyze(recorder.records).to_dict(), found)
    return found


def _codes(value: Any, found: Said) -> None:
    if isinstance(value, list):
        for item in value:
            _codes(item, found)
    elif isinstance(value, dict):
        if isinstance(value.get("code"), str):
            place = value.get("path") or value.get("location") or value.get("block") or ""
            found.append((value["code"], str(place)))
        for item in value.values():
            _codes(item, found)


def _run(program: str, *arguments: str) -> str:
    command = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


LINTERS: dict[str, Callable[[Path, Path, str], Said]] = {
    "kvlint": kvlint,
    "cachelint": cachelint,
    "prefixguard": prefixguard,
    "promptcachelint": promptcachelint,
}


def main() -> None:
    """See the module."""
    name, folder, *rest = sys.argv[1:]
    said = [LINTERS[name](before, after, rest[0] if rest else "") for before, after in pairs_in(Path(folder))]
    print(json.dumps({"version": metadata.version(name), "said": said}))


if __name__ == "__main__":
    main()
