"""Sessions that ask again a while after each answer, however long that took: standard library only."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

IDLE_S = 0.005

Step = Callable[[], Iterable[tuple[str, int, "dict[str, Any] | None"]]]
"""Of each request that moved: its name, how many tokens it has, and its answer where it has ended."""


def play(
    sessions: Sequence[dict[str, Any]],
    add: Callable[[dict[str, Any]], str],
    step: Step,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> list[list[dict[str, Any]]]:
    """Every session's answers. `add` hands a session's turn to the engine and names it.

    A request is due `gap_s` after the answer before it, and its clock starts when it is due: what keeps it from
    being handed over is part of its time.
    """
    due = [(float(session["start_s"]), index, 0) for index, session in enumerate(sessions)]
    heapq.heapify(due)
    found: list[list[dict[str, Any]]] = [[{} for _ in session["turns"]] for session in sessions]
    running: dict[str, tuple[int, int]] = {}
    begin = clock()
    while due or running:
        now = clock() - begin
        while due and due[0][0] <= now:
            at_s, index, turn = heapq.heappop(due)
            found[index][turn]["due_s"] = at_s
            running[add(sessions[index]["turns"][turn])] = (index, turn)
        if not running:
            sleep(min(IDLE_S, due[0][0] - now))
        # Without a request too: so a connector hears of what has ended.
        for name, tokens, answer in step():
            index, turn = running[name]
            now, kept = clock() - begin, found[index][turn]
            if tokens:
                kept.setdefault("ttft_s", now - kept["due_s"])
            if answer is None:
                continue
            del running[name]
            kept |= answer | {"end_s": now}
            if turn + 1 < len(sessions[index]["turns"]):
                heapq.heappush(due, (now + sessions[index]["turns"][turn + 1]["gap_s"], index, turn + 1))
    return found
