"""Admission, budget, preemption and pending work, without a model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.core.events import Event, RequestPreempted
from workmem.core.generation import GenerateRequest, SamplingParams
from workmem.core.outcomes import MissReason
from workmem.engines.embedded.block_pool import BlockPool
from workmem.engines.embedded.scheduler import BYPASS_MAX, Scheduler
from workmem.engines.embedded.sequence import Phase, Sequence

BLOCK = 4


class NoStore:
    """A fetcher below which there is nothing."""

    def fetch(self, seq: Sequence, vram_blocks: int, *, in_place: bool) -> bool:
        seq.lookup_reason = MissReason.COLD
        return True

    def fetched(self, seq: Sequence, vram_blocks: int) -> int:
        return 0

    def restore(self, seq: Sequence, vram_blocks: int, blocks: list[int]) -> None:
        raise AssertionError("nothing to restore")

    def attach(self, seq: Sequence) -> int:
        return 0

    def spill(self, seq: Sequence, count: int) -> bool:
        return False

    def forget(self, seq: Sequence) -> None:
        pass


def ignore(_: object) -> None:
    """The client of these requests does not look."""


class World:
    """A scheduler and the little that drives it: computing is booking, sampling is appending a token."""

    def __init__(self, blocks: int, *, batch_tokens: int = 16, running_max: int = 8) -> None:
        self.pool = BlockPool(blocks)
        self.events: list[Event] = []
        self.scheduler = Scheduler(
            self.pool,
            NoStore(),
            block_tokens=BLOCK,
            batch_tokens=batch_tokens,
            running_max=running_max,
            dram_blocks=0,
            sink=self.events.append,
        )
        self.now = 0.0
        self.done: list[str] = []

    def add(self, name: str, tokens: list[int], max_tokens: int, *, priority: int = 0) -> Sequence:
        request = GenerateRequest(id=name, token_ids=tokens, sampling=SamplingParams(), priority=priority)
        self.now += 1
        seq = Sequence(
            request, root=b"r" * 32, block_tokens=BLOCK, max_tokens=max_tokens, arrived=self.now, emit=ignore
        )
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[tuple[str, int, int]]:
        self.now += 1
        plan = self.scheduler.plan(self.now)
        for work in plan:
            self.scheduler.computed(work.seq, work.start + work.count)
            for index in range(work.seq.named, work.seq.computed // BLOCK):
                self.pool.name(work.seq.table[index], work.seq.keys[index])
            work.seq.named = work.seq.computed // BLOCK
            if work.seq.computed == len(work.seq.tokens):
                work.seq.tokens.append(100 + len(work.seq.tokens))
                work.seq.extend_keys()
                if work.seq.output_len >= work.seq.max_tokens:
                    self.scheduler.finish(work.seq)
                    self.done.append(work.seq.id)
        held = sum(1 for block in range(self.pool.block_count) if self.pool.holds(block))
        assert held == len({b for seq in self.scheduler.running for b in seq.table})
        assert self.scheduler.outstanding() <= self.pool.idle_count
        return [(work.seq.id, work.start, work.count) for work in plan]

    def run(self, steps_max: int = 2000) -> None:
        for _ in range(steps_max):
            if not self.scheduler.running and not self.scheduler.waiting:
                return
            self.step()
        raise AssertionError("work is left")


def test_a_long_prompt_is_cut_and_a_decode_keeps_its_turn() -> None:
    world = World(40)
    world.add("short", [1, 2, 3], 8)
    world.step()
    world.add("long", list(range(40)), 2)
    plan = world.step()
    assert ("short", 3, 1) in plan
    assert ("long", 0, 8) in plan, "beside decodes a prompt gets half of the budget"


def test_admission_commits_the_whole_growth() -> None:
    world = World(8)
    world.add("a", [1] * 8, 12)  # 5 blocks
    world.add("b", [2] * 4, 12)  # 4 blocks: together 9
    world.step()
    assert [seq.id for seq in world.scheduler.running] == ["a"]
    world.run()
    assert world.done == ["a", "b"]
    assert world.scheduler.preempted_count == 0


def test_one_that_does_not_fit_lets_others_past_but_not_for_ever() -> None:
    world = World(8, batch_tokens=64)
    world.add("first", [1] * 4, 8)  # 3 blocks
    world.step()
    big = world.add("big", [2] * 16, 8)  # 6 blocks: must wait
    world.add("small", [3] * 4, 4)  # 2 blocks
    world.step()
    assert {seq.id for seq in world.scheduler.running} == {"first", "small"}
    for number in range(BYPASS_MAX * 3):
        world.add(f"s{number}", [4 + number] * 4, 4)
        world.step()
        if big.phase is Phase.RUNNING:
            break
    assert big.phase is Phase.RUNNING
    assert big.bypassed <= BYPASS_MAX + 1


def test_priority_preempts_and_the_victim_loses_nothing() -> None:
    world = World(8)
    low = world.add("low", [1] * 8, 16, priority=5)  # 6 blocks
    for _ in range(4):
        world.step()
    written = list(low.tokens)
    world.add("high", [2] * 12, 8, priority=0)  # 5 blocks
    world.step()
    assert [seq.id for seq in world.scheduler.running] == ["high"]
    assert low.tokens == written
    assert any(isinstance(event, RequestPreempted) and event.by == "high" for event in world.events)
    world.run()
    assert sorted(world.done) == ["high", "low"]
    assert low.output_len == 16


def test_equal_priority_never_preempts() -> None:
    world = World(8)
    world.add("a", [1] * 8, 16)
    world.step()
    world.add("b", [2] * 12, 8)
    world.step()
    assert [seq.id for seq in world.scheduler.running] == ["a"]


def test_a_shared_prefix_is_computed_once_even_when_all_arrive_together() -> None:
    world = World(64, batch_tokens=8)
    shared = list(range(24))
    for number in range(5):
        world.add(f"agent{number}", [*shared, 1000 + number], 2)
    computed: dict[int, int] = {}
    while world.scheduler.running or world.scheduler.waiting:
        for _, start, count in world.step():
            for position in range(start, start + count):
                computed[position] = computed.get(position, 0) + 1
    assert all(computed[position] == 1 for position in range(24))
    assert world.scheduler.pending_count > 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 20), st.integers(1, 12), st.integers(0, 2), st.integers(0, 3), st.booleans()
        ),
        min_size=1,
        max_size=12,
    )
)
def test_any_load_finishes_whole(load: list[tuple[int, int, int, int, bool]]) -> None:
    """Every request that can fit ends with exactly its tokens, whatever priorities and prefixes it has."""
    world = World(9, batch_tokens=7, running_max=3)
    sequences = []
    for number, (prompt, output, priority, family, step_between) in enumerate(load):
        tokens = [family * 1000 + position for position in range(prompt)]
        sequences.append((world.add(f"r{number}", tokens, output, priority=priority), output))
        if step_between:
            world.step()
    world.run()
    for seq, output in sequences:
        assert seq.output_len == output
    assert world.pool.idle_count == 9


class Dram(NoStore):
    """Dram of enough room, whose saves let go of their blocks some steps late."""

    def __init__(self, pool: BlockPool, delay: int) -> None:
        self._pool = pool
        self._delay = delay
        self._held: list[tuple[int, int]] = []
        self._step = 0

    def save(self, seq: Sequence) -> None:
        """As the saver does: hold what has become complete until it is copied."""
        for index in range(max(seq.named, len(seq.spilled)), seq.computed // BLOCK):
            block = seq.table[index - len(seq.spilled)]
            if not seq.window:
                self._pool.name(block, seq.keys[index])
            self._pool.hold(block)
            self._held.append((self._step + self._delay, block))
        seq.named = max(seq.named, seq.computed // BLOCK)

    def tick(self) -> None:
        self._step += 1
        done = [block for due, block in self._held if due <= self._step]
        self._held = [(due, block) for due, block in self._held if due > self._step]
        for block in done:
            self._pool.let_go([block])

    def spill(self, seq: Sequence, count: int) -> bool:
        """The page is in dram as soon as it is complete; the saver's hold may still be on its way back."""
        seq.spilled += [(None, index) for index in range(count)]  # pyright: ignore[reportArgumentType]
        gone, seq.table = seq.table[:count], seq.table[count:]
        self._pool.let_go(gone)
        return True

    def forget(self, seq: Sequence) -> None:
        seq.spilled = []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=6),
    st.integers(0, 4),
)
def test_contexts_larger_than_the_pool_never_break_the_ledger(
    load: list[tuple[int, int, int]], delay: int
) -> None:
    """With shared prefixes, late saves and neighbours: nobody is promised a block that is not there."""
    pool = BlockPool(10)
    dram = Dram(pool, delay)
    scheduler = Scheduler(
        pool, dram, block_tokens=BLOCK, batch_tokens=8, running_max=3, dram_blocks=30, sink=lambda _: None
    )
    sequences = []
    for number, (prompt, output, family) in enumerate(load):
        tokens = [family * 1000 + position for position in range(prompt)]
        request = GenerateRequest(id=f"r{number}", token_ids=tokens, sampling=SamplingParams())
        seq = Sequence(
            request, root=b"r" * 32, block_tokens=BLOCK, max_tokens=output, arrived=number, emit=ignore
        )
        scheduler.add(seq)
        sequences.append((seq, output))
    for step in range(3000):
        if not scheduler.running and not scheduler.waiting:
            break
        for work in scheduler.plan(float(step)):
            scheduler.computed(work.seq, work.start + work.count)
            dram.save(work.seq)
            if work.seq.computed == len(work.seq.tokens):
                work.seq.tokens.append(7)
                work.seq.extend_keys()
                if work.seq.output_len >= work.seq.max_tokens:
                    scheduler.finish(work.seq)
        dram.tick()
    assert all(seq.output_len == output for seq, output in sequences)
    for _ in range(delay + 1):
        dram.tick()
    assert pool.idle_count == 10


def test_small_requests_pass_a_crowd_that_does_not_fit() -> None:
    world = World(8, batch_tokens=64)
    world.add("first", [1] * 4, 8)  # 3 blocks
    world.step()
    for number in range(20):
        world.add(f"big{number}", [10 + number] * 16, 8)  # 6 blocks each
    world.add("small", [3] * 4, 4)  # 2 blocks
    world.step()
    assert "small" in {seq.id for seq in world.scheduler.running}


def test_an_urgent_request_gets_a_place_when_all_are_taken() -> None:
    world = World(30, running_max=2)
    world.add("a", [1] * 4, 20, priority=3)
    world.add("b", [2] * 4, 20, priority=3)
    world.step()
    world.add("urgent", [3] * 4, 4, priority=0)
    world.step()
    assert "urgent" in {seq.id for seq in world.scheduler.running}
    world.run()
    assert sorted(world.done) == ["a", "b", "urgent"]


def test_a_spilled_block_is_taken_only_once_its_save_has_let_go() -> None:
    """The neighbour was promised its growth; blocks still held by a save are nobody's to take."""
    pool = BlockPool(8)
    dram = Dram(pool, delay=10_000)
    scheduler = Scheduler(
        pool, dram, block_tokens=BLOCK, batch_tokens=8, running_max=3, dram_blocks=30, sink=lambda _: None
    )

    def add(name: str, prompt: int, output: int) -> Sequence:
        request = GenerateRequest(id=name, token_ids=[len(name)] * prompt, sampling=SamplingParams())
        seq = Sequence(request, root=b"r" * 32, block_tokens=BLOCK, max_tokens=output, arrived=0, emit=ignore)
        scheduler.add(seq)
        return seq

    big, small = add("big", 44, 4), add("neighbour", 2, 13)
    for step in range(400):
        for work in scheduler.plan(float(step)):
            scheduler.computed(work.seq, work.start + work.count)
            if work.seq is big:
                dram.save(work.seq)
            if work.seq.computed == len(work.seq.tokens):
                work.seq.tokens.append(7)
                work.seq.extend_keys()
                if work.seq.output_len >= work.seq.max_tokens:
                    scheduler.finish(work.seq)
        others = sum(seq.committed - len(seq.table) for seq in scheduler.running if seq is not big)
        assert others <= pool.idle_count
        if step == 200:
            assert small.output_len == 13, "the neighbour goes on while the big one waits"
            for _ in range(10_001):
                dram.tick()
            dram._delay = 0
    assert big.output_len == 4
