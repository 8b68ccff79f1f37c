"""Which block leaves first: pure order, no clock, no lock, no bytes.

Segmented LRU over leaves. A block that was never reused goes before any that was, so a scan recycles
its own places (R8); a block goes only after the blocks behind it in its chain (R7). Recency is a
counter, not a time. Candidates sit in a heap whose stale entries are dropped when they surface.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Node(Generic[T]):
    """A block's place in the order. Opaque to callers but for `item`, `size` and `parked`."""

    __slots__ = ("item", "key", "live", "parent", "parked", "reused", "size", "stamp")

    def __init__(self, item: T, key: Hashable, parent: Hashable, size: int, stamp: int) -> None:
        self.item = item
        self.key = key
        self.parent = parent
        self.size = size
        self.stamp = stamp
        self.reused = False
        self.parked = False
        """Was the next victim while held; waits outside the heap for `unpark`."""
        self.live = True


class EvictionOrder(Protocol[T]):
    """What a tier needs of an eviction policy."""

    held_skips: int
    """How often a victim was passed over because it was held (R4)."""

    def __len__(self) -> int:
        """Blocks in the order."""
        ...

    def insert(self, item: T, key: Hashable, parent: Hashable, size: int) -> Node[T]:
        """A block became resident. `key` and `parent` link it to its chain; `size` in bytes."""
        ...

    def touch(self, nodes: Iterable[Node[T]]) -> None:
        """Blocks were used again."""
        ...

    def remove(self, node: Node[T]) -> None:
        """A block left, whatever the reason."""
        ...

    def pick(self, is_held: Callable[[T], bool]) -> Node[T] | None:
        """The next victim; it stays until `remove`. Held blocks met on the way are parked (R4)."""
        ...

    def unpark(self, node: Node[T]) -> None:
        """A parked block is no longer held."""
        ...


class SegmentedLru(Generic[T]):
    """Never-reused blocks first, then reused ones by age; leaves only.

    `protected_bytes` bounds the reused segment: past it the longest unused fall back among the
    never-reused, so that a new working set can displace an old one.
    """

    def __init__(self, protected_bytes: int) -> None:
        self._protected_max = protected_bytes
        self._protected: dict[Node[T], None] = {}
        self._protected_bytes = 0
        self._children: dict[Hashable, int] = {}
        self._nodes: dict[Hashable, Node[T]] = {}
        self._heap: list[tuple[bool, int, Node[T]]] = []
        self._stamp = 0
        self.held_skips = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def insert(self, item: T, key: Hashable, parent: Hashable, size: int) -> Node[T]:
        """See `EvictionOrder.insert`."""
        self._stamp += 1
        node = Node(item, key, parent, size, self._stamp)
        self._children[parent] = self._children.get(parent, 0) + 1
        self._nodes[key] = node
        self._offer(node)
        return node

    def touch(self, nodes: Iterable[Node[T]]) -> None:
        """See `EvictionOrder.touch`."""
        protected, children = self._protected, self._children
        stamp = self._stamp
        for node in nodes:
            stamp += 1
            node.stamp = stamp
            if node.reused:
                del protected[node]
            else:
                node.reused = True
                self._protected_bytes += node.size
            protected[node] = None
            # A parent's entry is made when its last child leaves, with the stamp it has then.
            if node.key not in children and not node.parked:
                heapq.heappush(self._heap, (True, stamp, node))
        self._stamp = stamp
        while self._protected_bytes > self._protected_max:
            oldest = next(iter(protected))
            self._unprotect(oldest)
            self._offer(oldest)
        self._compact()

    def remove(self, node: Node[T]) -> None:
        """See `EvictionOrder.remove`."""
        node.live = False
        del self._nodes[node.key]
        if node.reused:
            self._unprotect(node)
        left = self._children[node.parent] - 1
        if left:
            self._children[node.parent] = left
        else:
            del self._children[node.parent]
            parent = self._nodes.get(node.parent)
            if parent is not None:
                self._offer(parent)

    def pick(self, is_held: Callable[[T], bool]) -> Node[T] | None:
        """See `EvictionOrder.pick`."""
        heap = self._heap
        while heap:
            reused, stamp, node = heap[0]
            if not self._is_current(node, stamp, reused=reused):
                heapq.heappop(heap)
                continue
            if not is_held(node.item):
                return node
            heapq.heappop(heap)
            node.parked = True
            self.held_skips += 1
        return None

    def unpark(self, node: Node[T]) -> None:
        """See `EvictionOrder.unpark`."""
        if node.parked:
            node.parked = False
            if node.live:
                self._offer(node)

    def _unprotect(self, node: Node[T]) -> None:
        node.reused = False
        del self._protected[node]
        self._protected_bytes -= node.size

    def _offer(self, node: Node[T]) -> None:
        if not node.parked and node.key not in self._children:
            heapq.heappush(self._heap, (node.reused, node.stamp, node))

    def _is_current(self, node: Node[T], stamp: int, *, reused: bool) -> bool:
        return (
            node.live
            and not node.parked
            and node.stamp == stamp
            and node.reused == reused
            and node.key not in self._children
        )

    def _compact(self) -> None:
        """Keep the heap in proportion: leaves that are touched often leave stale entries behind."""
        if len(self._heap) > 64 + 2 * len(self._nodes):
            self._heap = [
                entry for entry in set(self._heap) if self._is_current(entry[2], entry[1], reused=entry[0])
            ]
            heapq.heapify(self._heap)
