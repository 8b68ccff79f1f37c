"""The simulated prefix cache against the plainest thing that does the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.index.simulation import CacheSimulation

# Bytes are quick to draw; few different tokens, so that prompts share beginnings.
PROMPTS = st.lists(st.binary(max_size=24).map(lambda data: [byte % 3 for byte in data]), max_size=12)


def longest_shared(prompt, earlier):
    best = 0
    for other in earlier:
        shared = next((i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
        best = max(best, min(len(prompt), len(other)) if shared is None else shared)
    return best


@given(PROMPTS, st.integers(1, 5))
def test_without_end_it_finds_whole_blocks_of_the_longest_shared_prefix(prompts, block):
    cache = CacheSimulation(block)
    for number, prompt in enumerate(prompts):
        shared = min(longest_shared(prompt, prompts[:number]), max(len(prompt) - 1, 0))
        assert cache.ask(prompt) == shared // block * block


@given(PROMPTS, st.integers(1, 5), st.integers(5, 20))
def test_a_bounded_one_holds_no_more_than_it_may_and_finds_no_more_than_a_boundless_one(prompts, block, room):
    bounded, boundless = CacheSimulation(block, room), CacheSimulation(block)
    for prompt in prompts:
        assert bounded.ask(prompt) <= boundless.ask(prompt)
        assert len(bounded) * block <= room


def test_what_was_used_longest_ago_leaves_first_and_ends_before_beginnings():
    cache = CacheSimulation(2, 8)
    old, new = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    cache.ask(old)
    cache.ask(new)
    assert cache.ask(old) == 4
    cache.ask([11, 12, 13])
    # The end of `new` had to go, its beginning is still there.
    assert cache.ask(new) == 2


def test_spaces_share_nothing():
    cache = CacheSimulation(1)
    cache.ask([1, 2, 3], "a")
    assert cache.ask([1, 2, 3], "b") == 0
    assert cache.ask([1, 2, 3], "a") == 2


def test_a_cache_without_room_for_a_block_is_refused():
    with pytest.raises(ValueError, match="in blocks of 16"):
        CacheSimulation(16, 8)
    with pytest.raises(ValueError, match="in blocks of 0"):
        CacheSimulation(0)
