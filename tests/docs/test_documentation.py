"""What README and docs say is tried: Python runs, commands parse, settings exist, links resolve."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from workmem.cli.commands import app
from workmem.config import load

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TESTS = {
    name
    for folder in ("tests", "engine_tests", "src/workmem/testing")
    for file in (ROOT / folder).rglob("*.py")
    for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))
}
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: str
    line: int
    info: str
    body: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page.relative_to(ROOT).as_posix(), line, match["info"], match["body"]))
    return found


def of(language: str) -> list[Block]:
    return [block for block in blocks() if block.info.split(" ")[0] == language]


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for block in [*of("console"), *of("bash")]:
        joined = block.body.replace("\\\n", " ")
        for line in joined.splitlines():
            command = line.removeprefix("$ ")
            if command.startswith("workmem "):
                found.append((f"{block}: {line}", shlex.split(command, comments=True)[1:]))
    return found


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_runs_or_says_why_it_does_not(block, tmp_path):
    compile(block.body, str(block), "exec")
    if re.fullmatch(r"python no-run: \S.*", block.info):
        return
    assert block.info == "python"
    command = [sys.executable, "-c", block.body]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("where", "words"), commands(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_commands_parse(where, words):
    command, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    assert callable(command), where
    load(environ={}, sets=bound.arguments.get("sets", ()))


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_settings_are_accepted(block, tmp_path):
    file = tmp_path / "workmem.toml"
    file.write_text(block.body)
    assert load(file, environ={}).origins


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    local = [target.partition("#")[0] for target in targets if not re.match(r"https?://|#|mailto:", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_list():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages - {"README.md"} if f"({page})" not in index} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tests_and_files_that_are_named_exist(page):
    code = " ".join(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))
    files = re.findall(r"\b(?:src|tests|bench|docs)/[\w/.-]*\w", code)
    assert [file for file in files if not (ROOT / file).exists()] == []
    named = set(re.findall(r"\btest_\w+\b(?!\.py)", re.sub(r"[\w/]+\.py", "", code)))
    assert named - TESTS == set()


def test_every_bound_of_the_store_is_in_the_list():
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    bounds = set(re.findall(r"(?:name=|_bound\()\"(store\.[\w.]+)\"", source))
    pages = [ROOT / "docs" / "internals" / name for name in ("buffer-rules.md", "host-store.md")]
    listed = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert len(bounds) > 15
    assert {bound for bound in bounds if f"`{bound}`" not in listed} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_make_targets_exist(page):
    targets = set(
        re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    code = [*re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8"))]
    blocks = "\n".join(re.findall(r"^```.*?^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
    code += re.findall(r"^\$? ?make ([a-z-]+)", blocks, re.MULTILINE)
    assert set(code) <= targets


def test_environment_names_exist():
    for page in PAGES:
        for name in re.findall(r"\bWORKMEM__[A-Z_]+[A-Z]\b", page.read_text(encoding="utf-8")):
            section, _, key = name.removeprefix("WORKMEM__").lower().partition("__")
            if key != "key":
                tree = getattr(load(environ={}).config, section)
                for part in key.split("__"):
                    tree = getattr(tree, part)
