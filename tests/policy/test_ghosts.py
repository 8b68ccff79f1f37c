"""Ghosts say what a bigger tier would have hit."""

from __future__ import annotations

import random

from workmem.policy.ghosts import Ghosts
from workmem.policy.lru import Lru
from workmem.policy.order import NO_ROW


def key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def asked(ghosts: Ghosts, key: bytes) -> float:
    """In how big a tier, in capacities, a block that comes in would have been; or infinity."""
    ghost = ghosts.find(key)
    ghosts.count(key, ghost)
    return ghost.size if ghost is not None else float("inf")


def run_lru(capacity: int, numbers: list[int], ghosts: Ghosts | None = None) -> int:
    """Hits of plain LRU over blocks of one byte without parents."""
    order, hits = Lru(), 0
    resident: set[int] = set()
    for number in numbers:
        if number in resident:
            hits += 1
            order.touch([number])
            continue
        if ghosts is not None:
            asked(ghosts, key(number))
        if len(resident) == capacity:
            victim = order.pick(lambda _: False)
            order.remove(victim)
            resident.remove(victim)
            if ghosts is not None:
                ghosts.left(key(victim), 1)
        order.insert(number, NO_ROW, 1)
        resident.add(number)
    return hits


def skewed(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [int(chance.paretovariate(0.6)) % 400 for _ in range(count)]


def test_says_exactly_what_a_bigger_lru_hits():
    asked = skewed(6000, 1)
    ghosts = Ghosts(40)
    hits = run_lru(40, asked, ghosts)
    assert ghosts.misses == len(asked) - hits
    for size, more in ghosts.hits().items():
        assert hits + more == run_lru(int(40 * size), asked)


def test_thinned_ghosts_come_close():
    asked = skewed(20_000, 2)
    exact, thin = Ghosts(80), Ghosts(80, one_in=4)
    run_lru(80, asked, exact)
    run_lru(80, asked, thin)
    assert len(thin) < len(exact) / 2
    assert 0.5 * exact.hits()[4.0] < thin.hits()[4.0] < 2 * exact.hits()[4.0]


def test_answers_with_the_smallest_size_that_would_have_had_it():
    ghosts = Ghosts(100)
    for number in range(5):
        ghosts.left(key(number), 24)
    assert asked(ghosts, key(4)) == 1.25
    assert asked(ghosts, key(3)) == 1.5
    assert asked(ghosts, key(0)) == 4.0
    assert asked(ghosts, key(0)) == float("inf"), "a ghost is given up when its block comes back"
    assert ghosts.hits() == {1.25: 1, 1.5: 2, 2.0: 2, 4.0: 3}


def test_is_bounded_and_says_when_that_cuts_the_measure_short():
    ghosts = Ghosts(1000, entries_max=10)
    for number in range(100):
        ghosts.left(key(number), 1)
    assert len(ghosts) == 10
    assert ghosts.cut_short == 90
    assert asked(ghosts, key(89)) == float("inf")
    assert asked(ghosts, key(90)) == 1.25


def test_what_no_imagined_tier_would_hold_is_forgotten():
    ghosts = Ghosts(4)
    for number in range(50):
        ghosts.left(key(number), 1)
    assert len(ghosts) == 12
    assert ghosts.cut_short == 0


def test_key_that_leaves_twice_is_one_ghost():
    ghosts = Ghosts(4)
    ghosts.left(key(1), 1)
    ghosts.left(key(1), 1)
    assert len(ghosts) == 1


def test_block_larger_than_any_imagined_tier_leaves_no_ghost():
    ghosts = Ghosts(4)
    ghosts.left(key(1), 13)
    assert len(ghosts) == 0
