"""What an engine's own prefix cache finds of requests: rendered by a model's template, in blocks of 16 tokens.

Nothing runs here but the tokenizer: a request's hit is the longest row of full blocks that an earlier one had as well,
short of its last token, as vLLM counts it. The cache forgets nothing.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prompt_traps import Trap

from workmem.core.errors import ClientError
from workmem.engines.embedded.tokenizer import ModelTokenizer
from workmem.prompt.canonical.canonicalise import canonicalise
from workmem.prompt.canonical.rules import DEFAULT_RULES, RULES
from workmem.prompt.decode import convert
from workmem.prompt.dialects.known import dialect_of_path
from workmem.prompt.dialects.places import Dialect
from workmem.prompt.messages import plain_content
from workmem.prompt.messages_to_chat import chat_of_count
from workmem.prompt.openai import ChatRequest
from workmem.prompt.responses_chat import as_chat, placed_input, read_request

BLOCK = 16
REACH = 0.95
"""Of the control's hit share, for a trap that means the same."""
_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "had",
    "by",
    "but",
    "not",
    "what",
    "all",
]


class Request(NamedTuple):
    """A recorded request."""

    dialect: Dialect
    body: dict[str, Any]


class Prompts:
    """Requests as token ids. Texts that come again are encoded once."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = ModelTokenizer(model)
        self._known: dict[bytes, list[int]] = {}

    def ids(self, request: Request, rules: Collection[str] = ()) -> list[int]:
        """Its prompt, after `rules`."""
        body = request.body
        if rules:
            body = canonicalise(copy.deepcopy(body), request.dialect, rules).body
        key = hashlib.blake2b(json.dumps([request.dialect.name, body]).encode()).digest()
        if key not in self._known:
            self._known[key] = self._render(body, request.dialect)
        return self._known[key]

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer.backend.encode(text, add_special_tokens=False).ids)

    def _render(self, body: dict[str, Any], dialect: Dialect) -> list[int]:
        chat = _CHATS[dialect.name](body)
        request = convert(chat, ChatRequest)
        messages = plain_content(chat["messages"], request.messages)
        rendered = self._tokenizer.render_chat(
            messages, tools=chat.get("tools") or [], template_kwargs=request.chat_template_kwargs
        )
        return list(rendered.token_ids)


def _chat_of_responses(body: dict[str, Any]) -> dict[str, Any]:
    request = read_request(body)
    return as_chat(body, request, placed_input(request)).chat


_CHATS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "chat": lambda body: body,
    "responses": _chat_of_responses,
    "messages": lambda body: chat_of_count(body).body,
}


class BlockCache:
    """Blocks by all that stands before them."""

    def __init__(self) -> None:
        self._held: set[bytes] = set()

    def ask(self, ids: Sequence[int]) -> int:
        """Tokens that are found; all full blocks are held from then on."""
        keys: list[bytes] = []
        parent = b""
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            words = b"".join(number.to_bytes(4, "little") for number in ids[start : start + BLOCK])
            parent = hashlib.blake2b(parent + words, digest_size=16).digest()
            keys.append(parent)
        usable = (len(ids) - 1) // BLOCK if ids else 0
        found = next((number for number in range(usable) if keys[number] not in self._held), usable)
        self._held.update(keys)
        return found * BLOCK


def hit_of_second(
    prompts: Prompts, before: Request, after: Request, rules: Collection[str] = ()
) -> dict[str, Any]:
    """What the later request finds of the earlier one."""
    cache = BlockCache()
    cache.ask(prompts.ids(before, rules))
    ids = prompts.ids(after, rules)
    return {"prompt_tokens": len(ids), "hit_tokens": cache.ask(ids)}


def hits_of_traps(prompts: Prompts, found: Sequence[Trap], dialect: Dialect) -> list[dict[str, Any]]:
    """Of each trap: the hit as it came, after the rules that are on, and with all of them; the control is the first."""
    rows: list[dict[str, Any]] = []
    choices = {"raw": (), "canonical": DEFAULT_RULES, "all_rules": [rule.name for rule in RULES]}
    for trap in found:
        before, after = Request(dialect, trap.before), Request(dialect, trap.after)
        row: dict[str, Any] = {"trap": trap.name, "is_lossless": trap.is_lossless}
        for name, rules in choices.items():
            row[name] = hit_of_second(prompts, before, after, rules)
            row[name]["share"] = row[name]["hit_tokens"] / row[name]["prompt_tokens"]
        control = rows[0] if rows else row
        for name in choices:
            row[name]["of_control"] = row[name]["share"] / control[name]["share"]
        if trap.is_lossless:
            row["reaches"] = row["canonical"]["of_control"] >= REACH
        rows.append(row)
    return rows


def recorded(folder: Path) -> dict[str, list[list[Request]]]:
    """By client: its runs, each a list of requests in their order. `folder` has CLIENT.jsonl, or CLIENT/RUN.jsonl, or .gz."""
    found: dict[str, list[list[Request]]] = {}
    for path in sorted(folder.iterdir()):
        files = sorted(path.glob("*.jsonl*")) if path.is_dir() else [path] if ".jsonl" in path.name else []
        runs = [run for run in map(_requests, files) if run]
        if runs:
            found[path.name.split(".")[0]] = runs
    return found


def _requests(path: Path) -> list[Request]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    found: list[Request] = []
    for line in text.splitlines():
        entry = json.loads(line)
        dialect = dialect_of_path(entry["path"].split("?")[0])
        body = _body(entry)
        if dialect is not None and body is not None:
            found.append(Request(dialect, body))
    return found


def _body(entry: dict[str, Any]) -> dict[str, Any] | None:
    if isinstance(entry.get("body_raw"), str):
        return json.loads(entry["body_raw"])
    if isinstance(entry.get("body"), dict):
        return entry["body"]
    shape = entry.get("body_shape")
    return _with_texts(shape) if isinstance(shape, dict) else None


def _with_texts(value: Any) -> Any:
    """A body of which texts were recorded by digest and length: others of that length in their place, the same for the same."""
    if isinstance(value, list):
        return [_with_texts(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"sha256", "chars"}:
        return _text(value["sha256"], value["chars"])
    return {key: _with_texts(item) for key, item in value.items()}


def _text(digest: str, chars: int) -> str:
    import random  # noqa: PLC0415

    chance = random.Random(digest)
    words = ""
    while len(words) < chars:
        words += " ".join(chance.choices(_WORDS, k=64)) + "\n"
    return words[:chars]


def hits_of_clients(prompts: Prompts, clients: dict[str, list[list[Request]]]) -> list[dict[str, Any]]:
    """Of each client: which share of turn n+1 was in the turns before it, as it came, with each rule, and with all.

    A share is of all tokens behind the first request of each run. `next_run` is the share of the first request of the
    second run, where there is one, that the first run left. `behind_base` is the share of the largest first request that
    the run of another client left, for `CLIENT_tomorrow` or `CLIENT_cwd2` behind `CLIENT`.
    """
    choices: dict[str, Collection[str]] = {"raw": (), "default": DEFAULT_RULES}
    choices |= {rule.name: (rule.name,) for rule in RULES}
    choices["all_rules"] = [rule.name for rule in RULES]
    rows: list[dict[str, Any]] = []
    for name, runs in clients.items():
        row: dict[str, Any] = {"client": name, "api": runs[0][0].dialect.name, "requests": len(runs[0])}
        try:
            for choice, rules in choices.items():
                row[choice] = _share_of_runs(prompts, runs, rules)
                base = clients.get(name.rsplit("_", 1)[0])
                if base is not None:
                    row[choice]["behind_base"] = _share_behind(prompts, base[0], runs[0], rules)
        except ClientError as error:
            row["refused"] = str(error)[:200]
        rows.append(row)
    return rows


def _share_of_runs(prompts: Prompts, runs: list[list[Request]], rules: Collection[str]) -> dict[str, Any]:
    cache = BlockCache()
    found = asked = 0
    next_run = None
    for number, run in enumerate(runs[:2]):
        for place, request in enumerate(run):
            ids = prompts.ids(request, rules)
            hit = cache.ask(ids)
            if number == 0 and place > 0:
                found, asked = found + hit, asked + len(ids)
            elif number == 1:
                next_run = hit / len(ids)
                break
    return {"share": found / asked if asked else None, "next_run": next_run}


def _share_behind(
    prompts: Prompts, base: Sequence[Request], run: Sequence[Request], rules: Collection[str]
) -> float:
    cache = BlockCache()
    for request in base:
        cache.ask(prompts.ids(request, rules))
    first = max((prompts.ids(request, rules) for request in run[:2]), key=len)
    return cache.ask(first) / len(first)
