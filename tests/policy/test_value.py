"""The value order: what is worth more stays longer, for a reason each."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from workmem.policy.order import NO_ROW, Loss, Prospect
from workmem.policy.value import PRIOR_ENDINGS, ReuseOdds, ValueOrder


def nobody_holds(_: int) -> bool:
    return False


def evict(order: ValueOrder) -> int:
    row = order.pick(nobody_holds)
    order.remove(row)
    return row


def drain(order: ValueOrder) -> list[int]:
    return [evict(order) for _ in range(len(order))]


def singles(count: int, order: ValueOrder | None = None) -> ValueOrder:
    order = order or ValueOrder()
    for row in range(count):
        order.insert(row, NO_ROW, 1)
    return order


def test_oldest_first_among_equals():
    assert drain(singles(5)) == [0, 1, 2, 3, 4]


def test_deeper_block_outlives_a_shallow_one_that_is_newer():
    order = ValueOrder(even_depth=4)
    for row in range(9):
        order.insert(row, row - 1, 1)
    order.insert(9, NO_ROW, 1)
    assert evict(order) == 9
    assert evict(order) == 8


def test_copy_elsewhere_makes_a_block_cheap_to_lose():
    order = singles(3)
    order.advise([2], loss=Loss.RELOAD)
    assert drain(order) == [2, 0, 1]


def test_done_goes_first_leaf_first():
    order = ValueOrder()
    for row in range(3):
        order.insert(row, row - 1, 1)
    order.insert(3, NO_ROW, 1)
    order.advise([3], loss=Loss.RELOAD)
    order.advise([0, 1, 2], prospect=Prospect.DONE)
    assert drain(order) == [2, 1, 0, 3]


def test_announced_use_keeps_a_block_longer_but_not_for_ever():
    order = singles(100)
    order.advise([0], prospect=Prospect.EXPECTED)
    left = []
    for _ in range(2000):
        left.append(evict(order))
        if left[-1] == 0:
            break
        order.insert(left[-1], NO_ROW, 1)
    assert 99 < len(left) < 2000


def test_pin_that_ends_leaves_a_block_as_one_looked_at_now():
    order = singles(3)
    order.advise([0], prospect=Prospect.PINNED)
    order.advise([0], prospect=Prospect.UNKNOWN)
    assert drain(order) == [1, 2, 0]


def test_announcement_is_used_up_by_the_use():
    order = singles(2)
    order.advise([0, 1], prospect=Prospect.EXPECTED)
    order.touch([0])
    assert drain(order) == [0, 1]


def test_scans_do_not_flush_what_is_used_again_and_again():
    order = singles(100)
    hot = list(range(90, 100))
    left: set[int] = set()
    for number in range(3000):
        row = evict(order)
        left.add(row if number > 500 else NO_ROW)
        if row in hot:
            hot.remove(row)
        order.insert(row, NO_ROW, 1)
        if number % 80 == 0:
            for used in hot:
                order.touch([used])
    assert len(hot) == 10


def test_block_that_comes_back_starts_as_reused():
    order = ValueOrder()
    order._reuse.count(0, again=0, left=10_000)
    order.insert(0, NO_ROW, 1, is_back=True)
    order.insert(1, NO_ROW, 1)
    assert drain(order) == [1, 0]


def test_block_that_comes_back_had_not_ended():
    order = ValueOrder()
    order._reuse.count(0, again=0, left=64)
    assert order._reuse.odds[0] == 0.25
    for row in range(32):
        order.insert(row, NO_ROW, 1, is_back=True)
    assert order._reuse.odds[0] == 0.5


def test_odds_are_learned_and_forget():
    odds = ReuseOdds()
    assert odds.odds[0] == 0.5
    odds.count(0, again=0, left=int(PRIOR_ENDINGS))
    assert odds.odds[0] == 0.25
    for _ in range(1000):
        odds.count(0, again=100, left=0)
    assert odds.odds[0] > 0.99
    for _ in range(1000):
        odds.count(0, again=0, left=100)
    assert odds.odds[0] < 0.02
    assert odds.odds[1] == 0.5


def test_restored_blocks_know_their_depth():
    order = ValueOrder(even_depth=4)
    order.restore([8, 7, 6, 5, 0], [7, 6, 5, NO_ROW, NO_ROW], [1] * 5)
    assert [order._depth[row] for row in (5, 6, 7, 8, 0)] == [0, 1, 2, 3, 0]
    order.touch([5, 6, 7, 8])
    assert evict(order) == 0


def test_block_costs_at_most_32_bytes():
    order = ValueOrder()
    order.restore(range(10_000), [NO_ROW] * 10_000, [1] * 10_000)
    columns = (order._older, order._newer, order._parent, order._children, order._size, order._depth)
    used = sum(len(column) * column.itemsize for column in columns)
    used += len(order._flags) + len(order._uses) + len(order._advice)
    assert used <= 32 * 10_000


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), min_size=1, max_size=60), st.booleans())
def test_chains_restored_side_by_side_have_each_block_s_own_depth_and_children(said, as_range):
    # A block follows the one before it, or names any that makes no circle: those before it, and by a shift later ones.
    count = len(said)
    parents = [
        index - 1 if follows else other % (index + 1) - 1 for index, (follows, other) in enumerate(said)
    ]
    shift = count // 2 if as_range else 0
    rows = range(3, 3 + count)
    turned = {index: (index + shift) % count for index in range(count)}
    given_parents = [NO_ROW] * count
    for index, parent in enumerate(parents):
        given_parents[turned[index]] = NO_ROW if parent < 0 else rows[turned[parent]]
    order = ValueOrder(even_depth=4)
    order.restore(rows if as_range else list(rows), given_parents, [1] * count)
    for index in range(count):
        depth, above = 0, index
        while parents[above] >= 0:
            depth, above = depth + 1, parents[above]
        row = rows[turned[index]]
        assert order._depth[row] == depth
        assert order._children[row] == given_parents.count(row)


def test_a_chain_deeper_than_its_column_counts_is_restored():
    order, count = ValueOrder(even_depth=4), 65_600
    order.restore(range(count), [NO_ROW, *range(count - 1)], [1] * count)
    assert [order._depth[row] for row in (1, 65_535, count - 1)] == [1, 65_535, 65_535]


def scanned(order: ValueOrder, turns: int, rows: set[int]) -> set[int]:
    """What is left of `rows` after so many single blocks came for one that left each."""
    for _ in range(turns):
        row = evict(order)
        rows.discard(row)
        order.insert(row, NO_ROW, 1)
    return rows


def test_reused_blocks_outlast_a_scan_and_not_all_scans_there_are():
    order = singles(100)
    order.touch(list(range(60)))
    assert len(scanned(order, 1500, set(range(60)))) == 60, "as long as the scan is not the work itself"
    assert scanned(order, 4000, set(range(60))) == set(), "what was used once must not stay for ever"


def test_use_keeps_reused_blocks_out_of_the_next_scan_as_well():
    order = singles(100)
    own = list(range(60))
    order.touch(own)
    left = set(own)
    for _ in range(4):
        left = scanned(order, 1000, left)
        order.touch(own)
    assert len(left) == 60


def test_regret_moves_the_room_of_new_blocks_between_its_bounds():
    order = singles(100)
    assert order._unproven_share == 0.2
    for _ in range(30):
        order.regret(1, was_used=False)
    assert round(order._unproven_share, 6) == 0.5
    for _ in range(10):
        order.regret(1, was_used=True)
    assert round(order._unproven_share, 6) == 0.4
    order.regret(1000, was_used=False)
    assert order._unproven_share == 1.0
    order.regret(1000, was_used=True)
    assert order._unproven_share == 0.2


def test_new_blocks_that_came_back_before_get_the_room_they_miss():
    """Turns that come back late: with a fifth of the tier they are gone by then, however often that happens."""
    order = singles(100)
    order.touch(list(range(80)))
    for _ in range(80):
        order.regret(1, was_used=False)
    gone = {evict(order) for _ in range(30)}
    assert gone & set(range(80)), "the room of new blocks now has no bound, and the oldest go"


def test_deeper_reused_block_outlives_a_shallow_one():
    order = ValueOrder(even_depth=4)
    for row in range(9):
        order.insert(row, row - 1, 1)
    order.insert(9, NO_ROW, 1)
    order.touch(list(range(9)))
    order.touch([9])
    assert evict(order) == 9
    assert evict(order) == 8


def test_count_of_unproven_bytes_holds_through_any_history():
    chance = random.Random(4)
    order, here = ValueOrder(even_depth=4), dict[int, int]()
    for _ in range(6000):
        row = chance.randrange(60)
        step = chance.randrange(6)
        if row not in here:
            order.insert(row, NO_ROW, size := chance.randrange(1, 9), is_back=step == 0)
            here[row] = size
        elif step == 0:
            order.remove(row)
            del here[row]
        elif step == 1:
            order.touch([row])
        elif step == 2:
            order.advise([row], prospect=Prospect(chance.randrange(4)), loss=Loss(chance.randrange(2)))
        elif (picked := order.pick(lambda _: chance.randrange(3) == 0)) != NO_ROW and step == 3:
            order.remove(picked)
            del here[picked]
        else:
            order.unpark(row)
        order.pick(nobody_holds)
        assert order._bytes == sum(here.values())
        assert order._unproven_bytes == sum(size for row, size in here.items() if not order.was_used(row))
