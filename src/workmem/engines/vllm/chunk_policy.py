"""Our eviction orders for the host memory of vLLM's tiered offload: what a `CachePolicy` of vLLM decides.

vLLM says what comes, what is used and how many must go; who goes is for the order. A bug of ours leaves the oldest
first: vLLM's tables depend on what is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from workmem.engines.vllm.chain import Chain
from workmem.engines.vllm.guard import Guard
from workmem.policy.choose import EvictionName, make_order
from workmem.policy.ghosts import GHOSTS_MAX, REGRET_REACH, Ghost, Ghosts
from workmem.policy.order import NO_ROW, EvictionOrder

_SIZE = 1
"""All chunks have the same: the order counts chunks, not bytes."""


class ChunkState(Protocol):
    """The part of vLLM's `ChunkStatus` that is read here."""

    @property
    def chunk_id(self) -> int:
        """Number of its row in host memory: no two chunks that are here share one."""
        ...

    @property
    def ref_cnt(self) -> int:
        """Transfers that read it; -1 while it is being written."""
        ...


State = TypeVar("State", bound=ChunkState)


class ChunkPolicy(Generic[State]):
    """Chunks that are in host memory, by name, and which of them leave it next. `capacity` in chunks."""

    def __init__(self, order: EvictionName, capacity: int) -> None:
        self._name: EvictionName = order
        self._capacity = capacity
        self._guard = Guard("eviction")
        self._chunks: dict[bytes, State] = {}
        self._name_of: dict[int, bytes] = {}
        self._parent_of: dict[int, int] = {}
        """Row of the chunk before, if that was here when this one came."""
        self._chain = Chain({})
        """Of the request whose chunks come next."""
        self._coming: dict[bytes, Ghost | None] = {}
        self._start()

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def off(self) -> str:
        """Why the order is not asked any more, and the oldest chunk leaves first; empty while it is."""
        return self._guard.off

    def get(self, name: bytes) -> State | None:
        """The chunk, if it is here."""
        return self._chunks.get(name)

    def missed(self, names: Iterable[bytes], chain: Chain) -> None:
        """These are not here and are about to be inserted, as far as room is found."""
        self._guard.call(lambda: self._miss(names, chain), None)

    def insert(self, name: bytes, chunk: State) -> None:
        """A chunk has a row now; its bytes are still to come."""
        self._chunks[name] = chunk
        self._name_of[chunk.chunk_id] = name
        self._guard.call(lambda: self._enter(name, chunk.chunk_id), None)

    def remove(self, name: bytes) -> None:
        """A chunk never came: its row is free again."""
        chunk = self._chunks.pop(name)
        del self._name_of[chunk.chunk_id]
        self._guard.call(lambda: self._order.remove(chunk.chunk_id), None)

    def used(self, names: Sequence[bytes]) -> None:
        """A request has used chunks again, in prefix order. Those that are gone are passed over."""
        rows = [self._chunks[name].chunk_id for name in names if name in self._chunks]
        self._guard.call(lambda: self._order.touch(rows), None)

    def let_go(self, name: bytes) -> None:
        """Nobody reads the chunk any more."""
        row = self._chunks[name].chunk_id
        self._guard.call(lambda: self._order.unpark(row), None)

    def evict(self, count: int, kept: Collection[bytes]) -> list[tuple[bytes, State]] | None:
        """Take out `count` chunks that nobody reads and that are not in `kept`. None, and all stay, if there are less."""
        rows = self._guard.call(lambda: self._pick(count, kept), [])
        if self._guard.off:
            rows = self._oldest(count, kept)
        if len(rows) < count:
            return None
        names = [self._name_of.pop(row) for row in rows]
        return [(name, self._chunks.pop(name)) for name in names]

    def clear(self) -> None:
        """Nothing is here any more, whoever reads it, and nothing is remembered."""
        self._chunks.clear()
        self._name_of.clear()
        self._coming.clear()
        self._start()

    # -- inside

    def _start(self) -> None:
        self._order: EvictionOrder = make_order(self._name, self._capacity * _SIZE)
        self._ghosts = Ghosts(self._capacity * _SIZE, entries_max=GHOSTS_MAX)

    def _miss(self, names: Iterable[bytes], chain: Chain) -> None:
        self._chain = chain
        # Before room is made for them: that pushes ghosts on.
        self._coming = {name: self._ghosts.find(name) for name in names}

    def _enter(self, name: bytes, row: int) -> None:
        ghost = self._coming.pop(name, None)
        self._ghosts.count(name, ghost)
        if ghost is not None and ghost.size <= REGRET_REACH:
            self._order.regret(ghost.bytes, was_used=ghost.was_used)
        before = self._chain.before(name)
        parent = None if before is None else self._chunks.get(before)
        self._parent_of[row] = NO_ROW if parent is None else parent.chunk_id
        self._order.insert(row, self._parent_of[row], _SIZE, is_back=ghost is not None)

    def _pick(self, count: int, kept: Collection[bytes]) -> list[int]:
        """Rows that leave, taken out of the order; none where there are less than `count`."""
        order = self._order
        stayed: list[int] = []

        def is_held(row: int) -> bool:
            name = self._name_of[row]
            if self._chunks[name].ref_cnt:
                return True
            if name in kept:
                stayed.append(row)
                return True
            return False

        left: list[tuple[int, bool]] = []
        while len(left) < count and (row := order.pick(is_held)) != NO_ROW:
            left.append((row, order.was_used(row)))
            order.remove(row)
        for row in stayed:
            order.unpark(row)
        if len(left) < count:
            self._put_back([row for row, _ in left])
            return []
        for row, was_used in left:
            self._ghosts.left(self._name_of[row], _SIZE, was_used=was_used)
        return [row for row, _ in left]

    def _put_back(self, rows: Sequence[int]) -> None:
        # The last that was taken out is the first to come back: parents left after their children.
        for row in reversed(rows):
            self._order.insert(row, self._parent_of[row], _SIZE, is_back=True)

    def _oldest(self, count: int, kept: Collection[bytes]) -> list[int]:
        free = (c.chunk_id for name, c in self._chunks.items() if not c.ref_cnt and name not in kept)
        return [row for row, _ in zip(free, range(count), strict=False)]
