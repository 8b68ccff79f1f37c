"""A system under test as a process that speaks JSON lines: standard library only, any Python.

Request: {"prompts": [[token id, ...], ...], "max_tokens": n}. All prompts start together, greedy, and
run to `max_tokens` whatever they say. Answer: {"events": [[seconds, prompt index, tokens], ...]},
one event per step and prompt that got tokens, seconds from the start.

A worker that does several things takes {"do": name, ...} and answers {"done": {...}} (`serve_requests`).

The controller stops the process (SIGSTOP) while others are measured, so idle threads never spin.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

Event: TypeAlias = tuple[float, int, int]
Run: TypeAlias = Callable[[list[list[int]], int], list[Event]]
Handle: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]

_PR_SET_PDEATHSIG = 1


def serve(load: Callable[[dict[str, Any]], tuple[dict[str, Any], Run]]) -> None:
    """Load with the options of the command line (JSON), say what was loaded, then answer until stdin ends."""

    def load_run(options: dict[str, Any]) -> tuple[dict[str, Any], Handle]:
        versions, run = load(options)
        return versions, lambda request: {"events": run(request["prompts"], request["max_tokens"])}

    _serve(load_run)


def serve_requests(load: Callable[[dict[str, Any]], tuple[dict[str, Any], Handle]]) -> None:
    """As `serve`, for a worker that does several things: what it returns is what was `done`."""

    def load_handle(options: dict[str, Any]) -> tuple[dict[str, Any], Handle]:
        versions, handle = load(options)
        return versions, lambda request: {"done": handle(request)}

    _serve(load_handle)


def end_with_controller() -> None:
    """The kernel ends this process with the one that started it: a stopped process does not see its stdin end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(load: Callable[[dict[str, Any]], tuple[dict[str, Any], Handle]]) -> None:
    end_with_controller()
    # Libraries print to stdout whatever we want; the controller gets a channel of its own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    versions, handle = load(json.loads(sys.argv[1]))
    say({"ready": versions})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say(handle(request))
        except Exception as error:  # noqa: BLE001 - boundary to foreign code: the controller records it
            say({"error": f"{type(error).__name__}: {error}"})
