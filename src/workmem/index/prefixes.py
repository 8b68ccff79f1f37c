"""Which earlier prompt shares the longest prefix with this one: a radix tree over token ids.

The tree forgets in the order it learnt. That makes one pointer per node enough: each node knows the
*latest* prompt that passes through it, so when the oldest prompt leaves, the nodes that still name it
are exactly those that nobody else needs. No reference counts, no rescans.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class HasTokens(Protocol):
    """What the tree stores: anything that owns its token ids."""

    @property
    def token_ids(self) -> array[int]:
        """Token ids, typecode "I"; never changed while held."""
        ...


P = TypeVar("P", bound=HasTokens)


class _Node(Generic[P]):
    """Tokens [start, end) of `latest`, and of every other prompt below this node."""

    __slots__ = ("children", "end", "ending", "latest", "start")

    def __init__(self, start: int, end: int, latest: P) -> None:
        self.start = start
        self.end = end
        self.latest = latest
        self.ending: P | None = None
        """The latest prompt that ends exactly at `end`."""
        self.children: dict[int, _Node[P]] = {}


class PrefixTree(Generic[P]):
    """Prompts of one space. `add` in order of arrival, `forget_oldest` in the same order."""

    def __init__(self) -> None:
        self._children: dict[int, _Node[P]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, prompt: P) -> tuple[P | None, int]:
        """Insert `prompt`; return its nearest predecessor and the length of their common prefix.

        Nearest means the longest common prefix; among equals one that `prompt` merely extends, then
        the latest. (None, 0) where nothing starts with the same token.
        """
        self._count += 1
        tokens = prompt.token_ids
        nearest: P | None = None
        children, depth = self._children, 0
        while depth < len(tokens):
            node = children.get(tokens[depth])
            if node is None:
                leaf = _Node(depth, len(tokens), prompt)
                leaf.ending = prompt
                children[tokens[depth]] = leaf
                return nearest, depth
            depth += common_prefix(tokens, node.latest.token_ids, depth, min(node.end, len(tokens)))
            if depth < node.end:
                node = _split(children, node, depth)
            nearest = node.latest if node.ending is None else node.ending
            node.latest = prompt
            if depth == len(tokens):
                node.ending = prompt
            children = node.children
        return nearest, depth

    def forget_oldest(self, prompt: P) -> None:
        """Take `prompt` out. It must be the one that was added before all others still held."""
        self._count -= 1
        tokens = prompt.token_ids
        above: tuple[dict[int, _Node[P]], int] | None = None
        children, depth = self._children, 0
        while depth < len(tokens):
            first = tokens[depth]
            node = children[first]
            if node.latest is prompt:
                del children[first]
                break
            if node.ending is prompt:
                node.ending = None
            above, children, depth = (children, first), node.children, node.end
        if above is not None:
            _merge(*above)


def common_prefix(a: Sequence[int], b: Sequence[int], start: int, end: int) -> int:
    """How many tokens from `start` on are equal, looking no further than `end`.

    Halves the range by whole-slice comparisons: those run in C, a loop over tokens would not.
    """
    if a[start:end] == b[start:end]:
        return end - start
    low, high = start, end
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low - start


def _split(children: dict[int, _Node[P]], node: _Node[P], depth: int) -> _Node[P]:
    """Cut `node` at `depth`; return the new upper half."""
    tokens = node.latest.token_ids
    upper = _Node(node.start, depth, node.latest)
    upper.children[tokens[depth]] = node
    children[tokens[node.start]] = upper
    node.start = depth
    return upper


def _merge(children: dict[int, _Node[P]], first: int) -> None:
    """Join a node with its only child where no prompt ends between them."""
    node = children[first]
    if node.ending is None and len(node.children) == 1:
        (child,) = node.children.values()
        child.start = node.start
        children[first] = child
