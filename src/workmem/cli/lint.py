"""`workmem lint`: recorded requests against a simulated prefix cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from cyclopts import Parameter, validators
from rich.markup import escape
from rich.table import Table

from workmem.cli.main import FAILED
from workmem.cli.store_folder import console_out, progress_bar
from workmem.config import cache_dir
from workmem.core.errors import ConfigError
from workmem.engines.embedded.prepare import KNOWN, cached_folder, prepare
from workmem.linting.files import Recorded, read
from workmem.linting.lint import Cache, Linter
from workmem.linting.rendering import Renderer, RoughRenderer
from workmem.linting.report import Report
from workmem.linting.sarif import as_sarif
from workmem.prompt.canonical.rules import DEFAULT_RULES, RULE_NAMES

APPROXIMATE = "approximate"
_BLOCKS = {"vllm": 16, "sglang": 1, "workmem": 16}
_SHOWN = 20


def lint(
    files: Annotated[list[Path], Parameter(consume_multiple=True)],
    /,
    *,
    model: str = "",
    engine: Literal["vllm", "sglang", "workmem"] = "vllm",
    block: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    cache_tokens: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    rules: str = "",
    fail_over: str = "0",
    json: Annotated[bool, Parameter(negative=())] = False,
    sarif: Path | None = None,
    write_patched: Path | None = None,
) -> int:
    """Say which recorded requests lose the prefix of earlier ones, why, and what repairs it.

    Requests are replayed in their order through the prefix cache of an engine, as they came and after the
    canonical rules. Exit code 0 where no more is lost than --fail-over allows, 1 where more is, 2 where a file
    cannot be read.

    Parameters
    ----------
    files
        One JSON body per line, of OpenAI's chat or Responses or Anthropic's Messages, also wrapped as proxies log
        them (`request`, `body`, `body_raw`, ...), or vLLM's log of requests; also .gz.
    model
        Folder or name of the model whose tokenizer and template make the prompts. If left out: the default
        model where it is prepared, else `approximate`, which needs none.
    engine
        Whose prefix cache is simulated.
    block
        Tokens of a block; the engine's usual one if left out (vllm and workmem 16, sglang 1).
    cache_tokens
        How many tokens the cache holds, least recently used leaving first; without end if left out.
    rules
        Rules by name, with commas: they are added to the lossless ones. `none` for none.
    fail_over
        Lost tokens that are allowed: a number, or a part of all prompt tokens such as 2%.
    json
        Print JSON.
    sarif
        File to write SARIF 2.1.0 to.
    write_patched
        File to write the requests to as they are after the rules, in the form in which they came.
    """
    allowed = _allowance(fail_over)
    chosen = _rules(rules)
    cache = Cache(engine, block or _BLOCKS[engine], cache_tokens)
    if cache_tokens is not None and cache_tokens < cache.block:
        raise ConfigError(f"--cache-tokens {cache_tokens}: less than one block of {cache.block} tokens")
    linter = Linter(cache, _renderer(model), chosen)
    skipped = [0]
    with _patched(write_patched) as write:
        for recorded in _recorded(files, skipped):
            canonical = linter.take(recorded)
            write(recorded, None if canonical is None else canonical.body)
    report = linter.report(skipped[0])
    if not report.requests:
        raise ConfigError(f"{', '.join(map(str, files))}: no request in it")
    if sarif is not None:
        with _writing(sarif, "--sarif") as out:
            out.write(msgspec.json.format(msgspec.json.encode(as_sarif(report))) + b"\n")
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        _show(report)
    return FAILED if report.lost_tokens > allowed(report.prompt_tokens) else 0


def _recorded(files: list[Path], skipped: list[int]) -> Generator[Recorded]:
    """All of them, with a bar of the bytes read."""

    def on_skip() -> None:
        skipped[0] += 1

    total = sum(file.stat().st_size for file in files if file.is_file())
    with progress_bar("replaying", total) as bar:
        for file in files:
            yield from read(file, bar.read, on_skip)


@contextmanager
def _patched(file: Path | None) -> Generator[Callable[[Recorded, dict[str, Any] | None], None]]:
    """Writes requests with another body to `file`, where there is one."""
    if file is None:
        yield lambda _, __: None
        return
    with _writing(file, "--write-patched") as out:

        def write(recorded: Recorded, body: dict[str, Any] | None) -> None:
            if body is not None:
                out.write(msgspec.json.encode(recorded.entry.with_body(body)) + b"\n")

        yield write


@contextmanager
def _writing(file: Path, option: str) -> Generator[BinaryIO]:
    try:
        with file.open("wb") as out:
            yield out
    except OSError as error:
        raise ConfigError(f"{option} {file}: cannot be written: {error}") from error


def _renderer(model: str) -> Renderer:
    if not model:
        folder = cached_folder(KNOWN[0], cache_dir())
        model = APPROXIMATE if folder is None else str(folder)
    if model == APPROXIMATE:
        return RoughRenderer()
    # Loads transformers, which takes seconds.
    from workmem.linting.template_rendering import TemplateRenderer  # noqa: PLC0415

    return TemplateRenderer(prepare(model, cache_dir()))


def _rules(given: str) -> frozenset[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    if names == ["none"]:
        return frozenset()
    for name in names:
        if name not in RULE_NAMES:
            raise ConfigError(f"--rules: no rule is named {name!r}; there are {', '.join(RULE_NAMES)}")
    return DEFAULT_RULES | frozenset(names)


def _allowance(given: str) -> Callable[[int], float]:
    """How many tokens may be lost of so many."""
    try:
        value = float(given.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (given.endswith("%") and value > 100):
        raise ConfigError(f"--fail-over {given!r}: neither a number of tokens nor a part of them such as 2%")
    return lambda tokens: tokens * value / 100 if given.endswith("%") else value


def _show(report: Report) -> None:
    console = console_out()
    held = "without end" if report.cache_tokens is None else f"of {report.cache_tokens:,} tokens"
    console.print(
        f"{report.requests} requests of {report.sessions} sessions, {report.prompt_tokens:,} prompt tokens "
        f"({escape(report.tokens_by)}); cache of {report.engine}, blocks of {report.block}, {held}"
    )
    before = _state(report.cached_tokens, report.prompt_tokens)
    after = _state(report.canonical_cached_tokens, report.canonical_prompt_tokens)
    console.print(f"as recorded: {before}; after the rules: {after}")
    for rule in report.rules:
        alone = _state(rule.cached_tokens, rule.prompt_tokens)
        console.print(f"  {rule.rule} changes {rule.requests} requests; alone: {alone}")
    if report.causes:
        console.print(_causes(report))
        if len(report.causes) > _SHOWN:
            console.print(f"... and {len(report.causes) - _SHOWN} more: --json has all")
    share = _rate(report.lost_tokens, report.prompt_tokens)
    console.print(f"{report.lost_tokens:,} tokens lost to {len(report.causes)} causes ({share} of all)")
    for note in report.notes:
        console.print(f"note: {escape(note)}")
    if report.skipped_lines:
        console.print(f"note: {report.skipped_lines} lines hold no prompt")


def _causes(report: Report) -> Table:
    table = Table("cause", "requests", "tokens lost", "where, and what to do", box=None, pad_edge=False)
    for column in (1, 2):
        table.columns[column].justify = "right"
    for one in report.causes[:_SHOWN]:
        rule = f" (rule {one.rule})" if one.rule else ""
        where = escape(f"{one.where or 'not in the body'}, most at {one.example}")
        table.add_row(one.cause, str(one.requests), f"{one.tokens:,}", where)
        table.add_row("", "", "", f"[bold]->[/] {escape(one.fix + rule)}")
    return table


def _state(cached: int, total: int) -> str:
    return f"{_rate(cached, total)} reused, {total - cached:,} tokens computed"


def _rate(part: int, total: int) -> str:
    return f"{part / total:.1%}" if total else "-"
