"""The load of the agents benchmark: sessions with the shapes of recorded ones, a part of their size, over recorded texts.

A coding session's sizes, gaps and cut-backs are those of a trace; a tau-bench one's are counted in its conversation, and
its gaps are drawn from the trace's: the conversations have no times.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fleet_load import cut, encoder_of, pools_of

EXCERPT = Path(__file__).parent / "sessions" / "coding.json"
SCALE = 16
"""Tokens and seconds of the recorded sessions over those of the load."""
GAP_MAX_S = 60.0
"""Recorded; longer ones are people who went away, and are cut to this."""
FIRST_MIN = 8000
"""Recorded tokens of a coding session's first prompt: what is shorter is no agent's loop but a side call."""
REQUESTS_MAX = 16
"""Of a session, that are looked at."""
CODING = 0.75
"""Part of the sessions; the others are tau-bench shaped."""
SYSTEM = 0.6
"""Part of a first prompt that is instructions and tools."""
UNIQUE = 8
"""Tokens drawn one by one where sessions part: what is behind them is nobody else's."""


class Turn(NamedTuple):
    """One request of a session, in recorded tokens and seconds or in those of the load."""

    kept: int
    """Leading tokens of the prompt before that this one begins with."""
    tokens: int
    """Of the prompt."""
    answer: int
    gap_s: float
    """From the answer before to this request."""
    is_tool: bool
    """A tool took that time, not a person."""


class Size(NamedTuple):
    """How much of it."""

    sessions: int
    requests: int
    """Of each session, from its beginning."""
    longest: int
    """Tokens that a prompt may have, of the load's."""
    spread_s: float
    """Sessions start within so many seconds."""


class Request(NamedTuple):
    """To be sent."""

    prompt: list[int]
    max_tokens: int
    gap_s: float
    new: int
    """Tokens that no request before could have left in a cache."""


class Session(NamedTuple):
    """One agent."""

    name: str
    start_s: float
    requests: list[Request]


# -- shapes


def coding_shapes(folder: Path | None) -> list[list[Turn]]:
    """Of the traces below `folder`, or of the excerpt that lies beside this file."""
    found = [shape for path in _files(folder) for shape in _traced(path)] if folder else []
    if found:
        return found
    sessions = json.loads(EXCERPT.read_text())["sessions"]
    return [[Turn(*values) for values in session] for session in sessions]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.jsonl*") if path.is_file())


def _lines(path: Path) -> Iterator[Any]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def _traced(path: Path) -> Iterator[list[Turn]]:
    for line in _lines(path):
        if not isinstance(line, dict) or not isinstance(line.get("requests"), list):
            return
        calls = [call for call in line["requests"] if call.get("hash_runs")][:REQUESTS_MAX]
        if calls and line.get("block_size"):
            yield traced(calls, line["block_size"])


def traced(calls: Sequence[dict[str, Any]], block_tokens: int) -> list[Turn]:
    """A recorded session's: `hash_runs` say how much of the prompt before a prompt begins with."""
    turns: list[Turn] = []
    blocks: list[int] = []
    for number, call in enumerate(calls):
        before, blocks = blocks, [first + at for first, length in call["hash_runs"] for at in range(length)]
        same = next((at for at, (a, b) in enumerate(zip(before, blocks, strict=False)) if a != b), None)
        kept = (min(len(before), len(blocks)) if same is None else same) * block_tokens
        gap_s = min(GAP_MAX_S, max(0.0, call.get("think_time", 0.0))) if number else 0.0
        is_tool = number > 0 and calls[number - 1].get("stop") == "tool_use"
        turns.append(Turn(min(kept, call["in"]), call["in"], max(1, call["out"]), gap_s, is_tool))
    return turns


def conversations(folder: Path | None) -> list[Sequence[dict[str, Any]]]:
    """Of the tau-bench runs below `folder` (lines with `traj` and `task_id`), or those that come with the package."""
    found: list[Sequence[dict[str, Any]]] = []
    for path in _files(folder) if folder else ():
        for line in _lines(path):
            if not isinstance(line, dict) or "traj" not in line or "task_id" not in line:
                break
            found.append(line["traj"])
    if found:
        return found
    from workmem.demo.runs import airline_runs  # noqa: PLC0415 - only the controller has it

    return [run.messages for run in airline_runs()]


def conversation_shape(
    messages: Iterable[dict[str, Any]], count: Callable[[dict[str, Any]], int], gap_s: Callable[[bool], float]
) -> list[Turn]:
    """A request before each of the assistant's messages. `gap_s` draws how long a tool, or a person, took."""
    turns: list[Turn] = []
    so_far, is_tool = 0, False
    for message in messages:
        tokens = count(message)
        if message["role"] == "assistant":
            kept = turns[-1].tokens if turns else 0
            turns.append(Turn(kept, so_far, max(1, tokens), gap_s(is_tool) if turns else 0.0, is_tool))
        is_tool = message["role"] in ("tool", "function")
        so_far += tokens
    return turns


def scaled(turn: Turn) -> Turn:
    """As the load has it."""
    tokens = max(1, turn.tokens // SCALE)
    kept = min(turn.kept // SCALE, tokens - 1)
    return Turn(kept, tokens, max(1, turn.answer // SCALE), turn.gap_s / SCALE, turn.is_tool)


# -- the load


class Load:
    """All sessions, the same for the same seed, shapes and texts."""

    def __init__(
        self,
        size: Size,
        coding: Sequence[list[Turn]],
        tau: Sequence[list[Turn]],
        texts: tuple[dict[str, list[int]], dict[str, list[int]]],
        seed: int,
    ) -> None:
        """`coding`, `tau`: shapes as recorded; `texts`: token ids by kind, and what stands before each part."""
        self._pools, self._heads = texts
        self._random = random.Random(seed)
        of_coding = round(size.sessions * CODING)
        picked = self._pick("coding", coding, of_coding, size) + self._pick(
            "tau", tau, size.sessions - of_coding, size
        )
        self.tool_gaps_s = sorted(
            turn.gap_s for _, turns in picked for turn in turns[1:] if turn.is_tool
        ) or [GAP_MAX_S / SCALE]
        """Of all requests that a tool was waited for."""
        # Every conversation of that kind begins with the same policy.
        policy = self._part(
            "system", int(min((s[0].tokens for k, s in picked if k == "tau"), default=0) * 0.9)
        )
        self.sessions: list[Session] = []
        for number, (kind, turns) in enumerate(picked):
            is_first = all(not session.name.startswith(kind) for session in self.sessions)
            shared = policy if kind == "tau" else []
            requests = self._requests(turns, shared, 0 if is_first else len(shared))
            self.sessions.append(
                Session(f"{kind}-{number}", self._random.uniform(0, size.spread_s), requests)
            )

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer."""
        return max(len(r.prompt) + r.max_tokens for s in self.sessions for r in s.requests)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(len(r.prompt) for s in self.sessions for r in s.requests)

    @property
    def new_tokens(self) -> int:
        """Those of them that a cache without bounds would leave to compute."""
        return sum(r.new for s in self.sessions for r in s.requests)

    def working_set(self, block_tokens: int) -> int:
        """Tokens of the blocks that the last prompts of all sessions have, each block counted once."""
        blocks = {
            tuple(session.requests[-1].prompt[:end])
            for session in self.sessions
            for end in range(block_tokens, len(session.requests[-1].prompt) + 1, block_tokens)
        }
        return len(blocks) * block_tokens

    def _pick(
        self, kind: str, shapes: Sequence[list[Turn]], count: int, size: Size
    ) -> list[tuple[str, list[Turn]]]:
        fitting = []
        for shape in shapes:
            turns = [scaled(turn) for turn in shape[: size.requests]]
            if len(turns) == size.requests and max(turn.tokens for turn in turns) <= size.longest:
                fitting.append(turns)
        if not fitting:
            raise SystemExit(
                f"no {kind} session has {size.requests} requests of at most {size.longest} tokens"
            )
        # Where there are too few, shapes come again: their texts differ.
        enough = fitting * -(-count // len(fitting))
        return [(kind, turns) for turns in self._random.sample(enough, count)]

    def _requests(self, turns: list[Turn], shared: list[int], known: int) -> list[Request]:
        requests: list[Request] = []
        prompt: list[int] = []
        for turn in turns:
            if requests:
                begin = prompt[: turn.kept]
                said = self._part("answer", min(requests[-1].max_tokens, turn.tokens - len(begin)))
                prompt = begin + said
                prompt = prompt + self._part("result", turn.tokens - len(prompt))
                new = turn.tokens - len(begin)
            else:
                rest = turn.tokens - len(shared)
                system = self._apart(int(rest * SYSTEM))
                prompt = shared + system + self._part("result", rest - len(system))
                new = turn.tokens - known
            requests.append(Request(prompt, turn.answer, turn.gap_s, new))
        return requests

    def _apart(self, tokens: int) -> list[int]:
        unique = [self._random.choice(self._pools["system"]) for _ in range(min(UNIQUE, tokens))]
        return unique + self._part("system", tokens - len(unique))

    def _part(self, kind: str, tokens: int) -> list[int]:
        return cut(self._random, self._heads[kind], self._pools[kind], tokens)


def load_of(size: Size, model: Path, folder: Path | None, seed: int) -> Load:
    """The load over shapes and texts of `folder`, or over those that come with the package."""
    coding = [shape for shape in coding_shapes(folder) if shape[0].tokens >= FIRST_MIN]
    encoded = encoder_of(model)
    chance = random.Random(seed)
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for shape in coding:
        for turn in shape[1:]:
            gaps[turn.is_tool].append(turn.gap_s)

    def count(message: dict[str, Any]) -> int:
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        return len(encoded(str(message.get("content") or "") + calls))

    tau = [
        conversation_shape(messages, count, lambda is_tool: chance.choice(gaps[is_tool]))
        for messages in conversations(folder)
    ]
    return Load(size, coding, tau, pools_of(model, folder), seed)
