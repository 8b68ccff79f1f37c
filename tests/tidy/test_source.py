"""Rules of the house that no linter checks."""

import ast
import re
from pathlib import Path

import msgspec
import pytest

from workmem.config import Config, is_section
from workmem.prompt.anthropic import CountRequest, MessagesRequest
from workmem.prompt.openai import ChatRequest, CompletionRequest
from workmem.prompt.responses import ResponsesRequest

SOURCE = Path(__file__).parents[2] / "src" / "workmem"
FILES = sorted(SOURCE.rglob("*.py"))

FUNCTION_LINES_MAX = 70
MODULE_LINES_SOFT = 300
MODULE_LINES_HARD = 500
BANNED_NAMES = {"utils", "util", "manager", "helper", "helpers", "common", "misc", "v2"}
PURE_PACKAGES = ("core", "prompt", "index", "policy")
CLOCK = "core/clock.py"
BROAD_EXCEPTS = {
    "cli/main.py": 1,
    "engines/embedded/engine_thread.py": 1,
    "engines/embedded/loading.py": 1,
    "engines/embedded/output.py": 1,
    "engines/vllm/guard.py": 1,
    "engines/vllm/offload_tier.py": 1,
    "engines/vllm/worker.py": 1,
    "gateway/exchange.py": 1,
    "gateway/generation.py": 1,
    "gateway/sse.py": 1,
    "store/host/keeper.py": 1,
    "store/host/saver.py": 2,
    "store/host/server.py": 1,
    "store/outbox.py": 1,
    "store/reader.py": 1,
    "store/rebuilding.py": 2,
    "store/saver.py": 1,
    "store/saving.py": 1,
    "store/scrubber.py": 1,
    "store/ticker.py": 1,
    "store/tiers/advice.py": 1,
    "store/tiers/attached.py": 2,
    "store/tiers/attached_reader.py": 1,
    "store/tiers/find.py": 1,
    "store/tiers/mooncake/lanes.py": 1,
    "store/tiers/mooncake/session.py": 1,
    "store/writer.py": 1,
    "transfer/batches.py": 1,
}
"""Where `except Exception` is legal, and how often: thread main, request boundary, plugin boundary."""


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def sections(struct: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """A section of the settings and all below it."""
    below = [field.type for field in msgspec.structs.fields(struct) if is_section(field.type)]
    return [struct, *(found for one in below for found in sections(one))]


def lines_of(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


READ = {
    node.attr
    for path in FILES
    for node in ast.walk(parse(path))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
}
"""Every attribute that is read somewhere."""


def test_functions_fit_a_screen():
    long = [
        f"{name_of(path)}:{node.lineno} {node.name} has {lines_of(node)} lines"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > FUNCTION_LINES_MAX
    ]
    assert not long


def test_modules_hold_one_idea(record_property):
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    record_property("over_soft_limit", {name: n for name, n in lengths.items() if n > MODULE_LINES_SOFT})
    assert {name: n for name, n in lengths.items() if n > MODULE_LINES_HARD} == {}


def test_only_config_reads_the_environment():
    readers = {
        name_of(path)
        for path in FILES
        for node in ast.walk(parse(path))
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv"})
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        )
    }
    assert readers == {"config.py"}


def test_pure_packages_know_no_clock_chance_or_thread():
    banned_modules = {"random", "threading", "asyncio", "socket", "secrets", "time"}
    breaches = [
        f"{name_of(path)}:{node.lineno} imports {', '.join(sorted(found))}"
        for path in FILES
        if name_of(path).startswith(PURE_PACKAGES) and name_of(path) != CLOCK
        for node in ast.walk(parse(path))
        if (found := imported(node) & banned_modules)
    ]
    assert not breaches


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module.split(".")[0]}
    return set()


def broad_handlers(path: Path) -> list[ast.ExceptHandler]:
    def names(kind: ast.expr | None) -> set[str]:
        if kind is None:
            return {"BaseException"}
        parts = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        return {part.id for part in parts if isinstance(part, ast.Name)}

    return [
        node
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler)
        and names(node.type) & {"Exception", "BaseException"}
        and not cleans_up(node)
    ]


def cleans_up(handler: ast.ExceptHandler) -> bool:
    """Releases what is held and lets the error go on: nothing is swallowed."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_broad_excepts_are_the_listed_ones():
    counts = {name_of(path): len(broad_handlers(path)) for path in FILES}
    assert {name: n for name, n in counts.items() if n} == BROAD_EXCEPTS


def test_broad_excepts_say_why():
    silent = []
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for handler in broad_handlers(path):
            # Beside the handler, above it, or as the first line of its body.
            near = lines[handler.lineno - 2 : handler.lineno + 1]
            reasons = [re.sub(r"noqa: [A-Z0-9, ]+", "", line.partition("#")[2]).strip(" -") for line in near]
            if not any(reasons):
                silent.append(f"{name_of(path)}:{handler.lineno}")
    assert not silent


def test_names_say_what_a_thing_is():
    modules = {part for path in FILES for part in Path(name_of(path)).with_suffix("").parts}
    words = {word for module in modules for word in module.split("_")}
    classes = {
        word.lower()
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
        for word in re.findall(r"[A-Z][a-z0-9]*", node.name)
    }
    assert not (words | classes) & BANNED_NAMES


@pytest.mark.parametrize(
    "struct",
    [ChatRequest, CompletionRequest, ResponsesRequest, CountRequest, MessagesRequest, *sections(Config)],
    ids=lambda one: one.__name__,
)
def test_every_field_of_a_request_and_every_setting_is_read(struct):
    """One that is taken and then forgotten does nothing, and nobody hears of it."""
    wanted = {field.name for field in msgspec.structs.fields(struct)} - {"schema_version"}
    assert wanted - READ == set()


def test_a_todo_names_its_issue():
    open_ended = [
        f"{path.name}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", line)
    ]
    assert not open_ended


def test_parameters_are_not_booleans_by_position():
    """A bare `True` at a call says nothing; an enum, a keyword or two functions do."""
    breaches = [
        f"{name_of(path)}:{node.lineno} {node.name}({argument.arg})"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in [*node.args.posonlyargs, *node.args.args]
        if isinstance(argument.annotation, ast.Name) and argument.annotation.id == "bool"
    ]
    assert not breaches


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_what_it_is(path):
    module = parse(path)
    assert not module.body or ast.get_docstring(module)


_LOADED = re.compile(r"(?:import_module|load_mooncake)\(\"(mooncake[\w.]*)\"")


def test_one_file_talks_to_each_of_mooncake_s_modules():
    """Its answers are told apart once: what is imported elsewhere would believe its 0."""
    talks = {
        (name_of(path), module)
        for path in FILES
        if not name_of(path).startswith("testing/")
        for module in _LOADED.findall(path.read_text(encoding="utf-8"))
    }
    imports = {
        name_of(path) for path in FILES for node in ast.walk(parse(path)) if "mooncake" in imported(node)
    }
    assert talks == {
        ("store/tiers/mooncake/link.py", "mooncake.store"),
        ("transfer/mooncake_engine.py", "mooncake.engine"),
    }
    assert not imports
