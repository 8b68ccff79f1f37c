"""The contexts of engines as a tree of text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.markup import escape
from rich.tree import Tree

from workmem.index.prefix_view import EngineView, Stretch

_COLOURS = {"GPU": "green", "CPU": "cyan", "STORAGE": "blue"}


def tree_of(engines: Sequence[tuple[EngineView, str]], lines: int) -> Group:
    """Engines with the state of each, and below it at most `lines` stretches, the largest contexts first."""
    return Group(*(_engine(view, state, lines) for view, state in engines))


def _engine(view: EngineView, state: str, lines: int) -> Tree:
    held = ", ".join(f"{count} in {place}" for place, count in sorted(view.blocks.items()) if count)
    tree = Tree(f"[bold]{escape(view.engine)}[/] ({escape(state)}): blocks {escape(held) or 'none'}")
    todo = [(one, tree) for one in reversed(view.contexts)]
    shown = 0
    while todo and shown < lines:
        stretch, above = todo.pop()
        node = above.add(_line(stretch))
        shown += 1
        todo += [(one, node) for one in reversed(stretch.below)]
    if todo:
        tree.add(f"... {sum(_size(stretch) for stretch, _ in todo)} more")
    return tree


def _size(stretch: Stretch) -> int:
    """Stretches from here on."""
    todo, found = [stretch], 0
    while todo:
        found += 1
        todo += todo.pop().below
    return found


def _line(stretch: Stretch) -> str:
    where = " ".join(
        f"[{_COLOURS.get(place.split('/')[0], 'default')}]{escape(place)}[/]" for place in stretch.places
    )
    words = [f"{stretch.tokens} tokens ({stretch.blocks} blocks)", where or "[dim]not held[/]"]
    if stretch.sessions:
        words.append(f"session {escape(', '.join(stretch.sessions))}")
    if stretch.salt:
        words.append(f"salt {stretch.salt}")
    if stretch.adapter:
        words.append(f"adapter {escape(stretch.adapter)}")
    if stretch.start:
        words.append(f"[dim]{' '.join(map(str, stretch.start))} ...[/]")
    return "  ".join(words)
