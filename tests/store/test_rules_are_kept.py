"""The internals pages and the code name the same rules, tests, sizes and bounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workmem.store.tiers import journal, journal_records, page_header, segments

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "docs" / "internals" / "buffer-rules.md").read_text(encoding="utf-8")
FORMAT = (ROOT / "docs" / "internals" / "journal-format.md").read_text(encoding="utf-8")
HOST = (ROOT / "docs" / "internals" / "host-store.md").read_text(encoding="utf-8")
TESTED = (ROOT / "docs" / "internals" / "what-is-tested.md").read_text(encoding="utf-8")
CODE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "workmem").rglob("*.py"))


@pytest.mark.parametrize("number", range(1, 11))
def test_rule_is_written_and_cited(number):
    assert f"**R{number}. " in RULES
    assert re.search(rf"\bR{number}\b", CODE), f"no code cites R{number}"


def test_every_test_named_by_a_page_exists():
    defined = set()
    suites = (ROOT / "src" / "workmem" / "testing").rglob("*_suite.py")
    engines = (ROOT / "engine_tests").rglob("test_*.py")
    for path in [*(ROOT / "tests").rglob("test_*.py"), *engines, *suites]:
        found = re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        defined |= set(found)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))}
    assert len(named) > 80
    assert named <= defined, named - defined


def test_bounds_named_by_the_page_are_those_of_the_code():
    named = set(re.findall(r"`(store\.[a-z_]+(?:\.[a-z_]+)?)`", RULES.partition("`BoundReached` names:")[2]))
    of_host = set(re.findall(r"\| `(store\.host\.[a-z_]+)` \|", HOST))
    used = set(re.findall(r'BoundReached\(\s*name="(store\.[\w.]+)"', CODE))
    assert {name for name in used if not name.startswith("store.host.")} == named
    assert {name for name in used if name.startswith("store.host.")} <= of_host


def test_sizes_in_the_format_page_are_those_of_the_code():
    assert f"| 2 put | {journal_records._PUT.size} |" in FORMAT
    assert f"| 3 delete | {journal_records._DELETE.size} |" in FORMAT
    assert f"| 1 namespace | {journal_records._NAMESPACE.size} + J |" in FORMAT
    assert f"| {journal._FILE.size} | | batches |" in FORMAT
    assert f"| {journal._BATCH.size} | | records |" in FORMAT
    assert f"| {page_header._FIXED.size} | 4 T | token ids |" in FORMAT
    assert f"| {segments._HEADER.size} | {4096 - segments._HEADER.size} | zero |" in FORMAT


def test_every_failure_named_by_the_page_has_a_test():
    rows = [line for line in TESTED.splitlines() if line.startswith("| ")]
    bodies = [row for row in rows if not row.startswith(("| what goes wrong", "| ---"))]
    assert len(bodies) > 20
    assert [row for row in bodies if "`test_" not in row.split("|")[3]] == []
