"""The order in which vLLM admits waiting requests, and whom it holds back for those that cannot wait.

Mechanism alone: an `Admission` decides. Without hints nothing is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Protocol, TypeVar

from workmem.engines.vllm.pins import BlockPool
from workmem.engines.vllm.requests import EngineRequest
from workmem.policy.admission import Admission, Candidate, Room
from workmem.prompt.hints import read_hints

_SWEEP = 256
"""So many requests that are gone are kept in mind before they are looked for."""

R = TypeVar("R", bound=EngineRequest)


class Named(Protocol):
    """A request, as far as its name goes."""

    @property
    def request_id(self) -> str:
        """VLLM's name for it."""
        ...


class Admitting:
    """Of one engine. `clock` in seconds, never back. Called by the scheduler's thread alone."""

    def __init__(
        self, policy: Admission, pool: BlockPool, block_tokens: int, clock: Callable[[], float]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._policy = policy
        self._pool = pool
        self._size = block_tokens
        self._clock = clock
        self._known: dict[str, Candidate] = {}
        self._ranked: set[str] = set()
        """Those with a priority: without any of them the engine's own order stays."""
        self._critical: set[str] = set()
        self._critical_seen_s: float | None = None

    def arrives(self, request: EngineRequest) -> None:
        """A request joins the queue, or goes on in it with more input."""
        name = request.request_id
        hints = read_hints(request.kv_hints, request.kv_transfer_params, request.session_id)
        known = self._known.get(name)
        candidate = Candidate(
            arrived_s=self._clock() if known is None else known.arrived_s,
            session=hints.session,
            priority=hints.priority,
        )
        self._known[name] = candidate
        if candidate.priority:
            self._ranked.add(name)
        if self._policy.is_critical(candidate):
            self._critical.add(name)
            self._critical_seen_s = self._clock()

    def begin_step(self, requests: Container[str], count: int) -> None:
        """A step is about to be made up. `requests`: all that the engine has, `count` of them."""
        self._critical = _still(self._critical, requests)
        self._ranked = _still(self._ranked, requests)
        if self._critical:
            self._critical_seen_s = self._clock()
        if len(self._known) > count + _SWEEP:
            self._known = {name: known for name, known in self._known.items() if name in requests}

    def order(self, waiting: Sequence[R]) -> list[R] | None:
        """`waiting` in the order to admit them; None where it is right as it is."""
        if not self._ranked or all(request.request_id not in self._ranked for request in waiting):
            return None
        ranks = [self._policy.rank(self._candidate(request)) for request in waiting]
        best = sorted(range(len(waiting)), key=ranks.__getitem__)
        if best == list(range(len(waiting))):
            return None
        self.counts["reordered"] += 1
        return [waiting[index] for index in best]

    def is_held_back(
        self,
        request: EngineRequest,
        running: Sequence[EngineRequest],
        table: Callable[[str], Sequence[int]],
        gives_way: Callable[[], int],
    ) -> bool:
        """Whether a request has to wait although there may be room for it, because that is kept for others.

        `table`: the blocks of a running request. `gives_way`: blocks that nobody runs on and that would be free at
        once. An engine that runs nothing holds nobody back: nothing would ever change.
        """
        seen_s = self._critical_seen_s
        if seen_s is None or not running:
            return False
        candidate = self._candidate(request)
        if self._policy.is_critical(candidate):
            return False
        held: set[int] = set()
        for other in running:
            if other.request_id in self._critical:
                held.update(table(other.request_id))
        room = Room(blocks=self._pool.num_gpu_blocks, critical_blocks=len(held), critical_seen_s=seen_s)
        keeps = self._policy.keeps_free(candidate, room, self._clock())
        if not keeps:
            return False
        free = self._pool.get_num_free_blocks() + gives_way()
        # What those that run still need for their prompts was counted when they were admitted.
        promised = sum(self._blocks(other) for other in running)
        is_held = free - promised - self._blocks(request) + self._in_use(request) < keeps
        self.counts["held_back"] += is_held
        return is_held

    # -- inside

    def _candidate(self, request: Named) -> Candidate:
        return self._known.get(request.request_id) or Candidate(arrived_s=self._clock())

    def _blocks(self, request: EngineRequest) -> int:
        """Blocks that it still needs for the tokens it has now."""
        return max(0, -(-request.num_tokens // self._size) - -(-request.num_computed_tokens // self._size))

    def _in_use(self, request: EngineRequest) -> int:
        """Of its leading blocks, how many it would share with requests that run."""
        shared = 0
        for name in request.block_hashes:
            found = self._pool.get_cached_block(name, [0])
            if found is None:
                break
            shared += found[0].ref_cnt > 0
        return shared


def _still(names: Iterable[str], requests: Container[str]) -> set[str]:
    return {name for name in names if name in requests}
