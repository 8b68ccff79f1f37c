"""`workmem index watch`: which contexts engines hold, as their KV events tell it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console, Group
from rich.live import Live

from workmem.cli.index_tree import tree_of
from workmem.core.errors import ConfigError
from workmem.engines.vllm.event_source import EventSource, Sockets, zmq_sockets
from workmem.engines.vllm.event_stream import EventStream, StreamState
from workmem.index.prefix_view import EngineView, view_of
from workmem.index.residency import ResidencyIndex, ResidencyStats

_PAUSE_S = 0.05


class WatchedEngine(msgspec.Struct):
    """An engine at one moment."""

    state: StreamState
    is_partial: bool
    counts: dict[str, int]
    view: EngineView


class Watched(msgspec.Struct):
    """All engines at one moment: a line of `--json`."""

    at: float
    """Unix seconds."""
    engines: list[WatchedEngine]
    blocks: int
    forgotten: int


def watch(
    *,
    endpoint: Annotated[tuple[str, ...], Parameter(negative=())] = ("tcp://127.0.0.1:5557",),
    replay: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    topic: str = "",
    every: float = 1.0,
    seconds: float = 0.0,
    lines: int = 40,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Show which contexts engines hold, where, and of which sessions; live on a terminal, else anew for each change.

    vLLM publishes with `--kv-events-config '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5558"}'`. A context is a chain of blocks; a fork is where contexts part. Whoever can
    reach the endpoints learns the token ids of all prompts.

    Parameters
    ----------
    endpoint
        Where an engine publishes, may be repeated: ADDRESS or NAME=ADDRESS. One with a * in it is listened at.
    replay
        Where it sends again what was missed: as many of these as endpoints, in the same order, or none.
    topic
        Only messages whose topic starts so.
    every
        Seconds between two looks.
    seconds
        Stop after so many; 0: when interrupted.
    lines
        Most lines for each engine.
    json
        Print a line of JSON for each change.
    """
    if replay and len(replay) != len(endpoint):
        raise ConfigError(f"--replay: {len(replay)} given for {len(endpoint)} of --endpoint; give one each")
    if not 0 < every <= 3600 or lines < 1:
        raise ConfigError("--every must lie above 0 and --lines at 1 or above")
    index = ResidencyIndex()
    with contextlib.ExitStack() as stack:
        sources: list[EventSource] = []
        for place, again in zip(endpoint, replay or [""] * len(endpoint), strict=True):
            name, address = _named(place)
            made = source_of(index, name, zmq_sockets(address, again, topic))
            sources.append(made)
            stack.callback(made.close)
        show = _print_json if json else stack.enter_context(_screen(lines))
        for watched in follow(index, sources, every, seconds):
            show(watched)


def source_of(index: ResidencyIndex, engine: str, sockets: Sockets) -> EventSource:
    """A source that tells `index` of `engine`."""
    stream = EventStream(engine, index, can_replay=sockets.can_replay, now=time.monotonic())
    return EventSource(stream, sockets)


def follow(
    index: ResidencyIndex, sources: Sequence[EventSource], every_s: float, seconds: float
) -> Iterator[Watched]:
    """Listen, and give a view whenever something has changed; the first one in any case. `seconds`: 0 for ever."""
    start = time.monotonic()
    before: object = None
    while not seconds or time.monotonic() < start + seconds:
        end = time.monotonic() + every_s
        while (now := time.monotonic()) < end:
            taken = sum(source.pump() for source in sources)
            if not taken:
                for source in sources:
                    source.wait(min(_PAUSE_S, end - now) / len(sources))
        now_known = [(source.stream.state, source.stream.counts["batches"]) for source in sources]
        stats = index.stats()
        if (now_known, stats) != before:
            before = (now_known, stats)
            yield _watched(index, sources, stats)


def _watched(index: ResidencyIndex, sources: Sequence[EventSource], stats: ResidencyStats) -> Watched:
    engines = [
        WatchedEngine(
            state=source.stream.state,
            is_partial=source.stream.is_partial,
            counts=dict(source.stream.counts),
            view=view_of(index, source.stream.engine),
        )
        for source in sources
    ]
    return Watched(at=time.time(), engines=engines, blocks=stats.blocks, forgotten=stats.forgotten)


def _named(place: str) -> tuple[str, str]:
    """NAME=ADDRESS, or an address that is its own name."""
    name, equals, address = place.partition("=")
    if equals and "://" not in name:
        return name, address
    return place, place


def _print_json(watched: Watched) -> None:
    sys.stdout.write(msgspec.json.encode(watched).decode() + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _screen(lines: int) -> Generator[Callable[[Watched], None]]:
    """Where a view is shown: in place on a terminal, else one below the other."""
    if sys.stdout.isatty():
        with Live(auto_refresh=False) as live:
            yield lambda watched: live.update(_tree(watched, lines), refresh=True)
        return
    console = Console(width=120, highlight=False)
    yield lambda watched: console.print(_tree(watched, lines))


def _tree(watched: Watched, lines: int) -> Group:
    return tree_of([(one.view, _state_of(one)) for one in watched.engines], lines)


def _state_of(one: WatchedEngine) -> str:
    words = [one.state.value]
    if one.is_partial:
        words.append("older blocks are not known")
    words += [f"{one.counts[name]} {name}" for name in ("gaps", "restarts", "lost") if one.counts.get(name)]
    return ", ".join(words)
