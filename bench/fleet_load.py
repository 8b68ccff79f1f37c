"""The load of the fleet benchmark: agents whose contexts grow by answers, tool results and messages of other agents.

Texts are recorded ones, cut to size, so that a run has as many prompt tokens as it is meant to have.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

CHARS_MAX, FILE_BYTES_MAX = 4_000_000, 500_000
SUFFIXES = {".json", ".jsonl", ".traj"}
SHARED = 0.5
"""Part of an agent's first context that all agents begin with: instructions and tools."""
ANSWER, RESULT = 0.3, 0.5
"""Parts of what a round adds: the agent's own words, what its tool says; the rest is another agent's message."""
_KINDS = {"system": "system", "developer": "system", "assistant": "answer", "ai": "answer"}


class Size(NamedTuple):
    """How many, and how long in tokens."""

    agents: int
    rounds: int
    first: int
    """Of each agent's first prompt."""
    last: int
    """Of each agent's last one; they grow evenly."""

    def prompt_tokens(self, round_number: int) -> int:
        """Of each agent's prompt in that round."""
        return self.first + (self.last - self.first) * round_number // max(1, self.rounds - 1)

    @property
    def total(self) -> int:
        """Prompt tokens of all requests."""
        return self.agents * sum(self.prompt_tokens(number) for number in range(self.rounds))

    @property
    def working_set(self) -> int:
        """Different tokens of the last round's contexts."""
        shared = int(self.first * SHARED)
        return shared + self.agents * (self.last - shared)


class Load:
    """All prompts, as token ids, the same for the same seed and texts."""

    def __init__(
        self, size: Size, pools: dict[str, list[int]], heads: dict[str, list[int]], seed: int
    ) -> None:
        """`pools`: token ids of texts by kind (system, answer, result); `heads`: what stands before each part."""
        self._size = size
        self._pools = pools
        self._heads = heads
        self._random = random.Random(seed)
        shared = self._part("system", int(size.first * SHARED))
        self._contexts = [shared + self._part("system", size.first - len(shared)) for _ in range(size.agents)]
        self._rounds: list[list[list[int]]] = [[list(ids) for ids in self._contexts]]
        before = [ids[-size.first // 4 :] for ids in self._contexts]
        for number in range(1, size.rounds):
            before = self._grow(size.prompt_tokens(number) - size.prompt_tokens(number - 1), before)
            self._rounds.append([list(ids) for ids in self._contexts])

    def prompts(self, round_number: int) -> list[list[int]]:
        """Of all agents, in order."""
        return self._rounds[round_number]

    def _grow(self, added: int, before: list[list[int]]) -> list[list[int]]:
        """Add a round to every context; `before` are the answers of the round before. Returns those of this one."""
        answers = []
        for agent in range(len(self._contexts)):
            answer = self._part("answer", int(added * ANSWER))
            result = self._part("result", int(added * RESULT))
            # What another agent said is passed on word for word, as orchestrators do.
            said = self._heads["message"] + before[agent - 1]
            message = said[: added - len(answer) - len(result)]
            message += self._part("result", added - len(answer) - len(result) - len(message))
            self._contexts[agent] += answer + result + message
            answers.append(answer[len(self._heads["answer"]) :])
        return answers

    def _part(self, kind: str, tokens: int) -> list[int]:
        return cut(self._random, self._heads[kind], self._pools[kind], tokens)


def cut(chance: random.Random, head: list[int], pool: list[int], tokens: int) -> list[int]:
    """`tokens` ids in all: `head`, and behind it what stands in `pool` from random places on."""
    ids = list(head)[:tokens]
    while len(ids) < tokens:
        start = chance.randrange(len(pool))
        ids += pool[start : start + tokens - len(ids)]
    return ids


def load_of(size: Size, model: Path, folder: Path | None, seed: int) -> Load:
    """The load over texts of `folder`, or over those that come with the package."""
    return Load(size, *pools_of(model, folder), seed)


def pools_of(model: Path, folder: Path | None) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Token ids of texts by kind, and what stands before each part; texts as in `load_of`."""
    encoded = encoder_of(model)
    texts: dict[str, list[str]] = {"system": [], "answer": [], "result": []}
    for kind, text in _packaged() if folder is None else messages_of(folder):
        texts[kind].append(text)
    empty = [kind for kind, found in texts.items() if not found]
    if empty:
        raise SystemExit(f"{folder} has no messages of these kinds: {', '.join(empty)}")
    pools = {kind: [i for text in found for i in encoded(text)] for kind, found in texts.items()}
    heads = {kind: encoded(f"\n\n[{kind}]\n") for kind in ("system", "answer", "result", "message")}
    return pools, heads


def encoder_of(model: Path) -> Callable[[str], list[int]]:
    """Text to token ids, without special ones."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - only the controller has it

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _packaged() -> Iterator[tuple[str, str]]:
    from workmem.demo.runs import airline_runs  # noqa: PLC0415 - only the controller has it

    for run in airline_runs():
        yield from messages_in(list(run.messages))


def messages_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Kind and text of every message in the JSON files below `folder`, zipped ones too, whatever surrounds them."""
    left = CHARS_MAX
    # Requests repeat the conversation so far.
    seen: set[str] = set()
    for path in sorted(folder.rglob("*")):
        suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
        if not path.is_file() or not SUFFIXES & set(suffixes[-1:]) or path.stat().st_size > FILE_BYTES_MAX:
            continue
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        for value in _values(data.decode(errors="ignore")):
            for kind, text in messages_in(value):
                if text not in seen and left > 0:
                    seen.add(text)
                    left -= len(text)
                    yield kind, text


def _values(text: str) -> Iterable[Any]:
    """One JSON value, or one a line; what is neither is left out."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        found = []
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found


def messages_in(value: Any) -> Iterator[tuple[str, str]]:
    """Messages anywhere inside: objects with a role and a text."""
    if isinstance(value, list):
        for item in value:
            yield from messages_in(item)
    elif isinstance(value, dict):
        role, content = value.get("role"), value.get("content")
        if isinstance(role, str) and isinstance(content, str) and content.strip():
            yield _KINDS.get(role, "result"), content
        else:
            for item in value.values():
                yield from messages_in(item)
