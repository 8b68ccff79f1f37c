"""S3-FIFO: new blocks prove themselves in the small queue."""

from __future__ import annotations

from workmem.policy.order import NO_ROW
from workmem.policy.s3fifo import S3Fifo


def evict(order: S3Fifo) -> int:
    row = order.pick(lambda _: False)
    order.remove(row)
    return row


def test_block_used_twice_moves_to_main_and_one_used_once_leaves():
    order = S3Fifo(0)
    for row in range(4):
        order.insert(row, NO_ROW, 1)
    order.touch([0])
    order.insert(4, NO_ROW, 1)
    order.touch([0])
    order.touch([1])
    assert [evict(order) for _ in range(5)] == [1, 2, 3, 4, 0]


def test_block_that_comes_back_enters_main():
    order = S3Fifo(20)
    order.insert(0, NO_ROW, 1, is_back=True)
    for row in (1, 2, 3):
        order.insert(row, NO_ROW, 1)
    assert [evict(order) for _ in range(2)] == [1, 0], "main gives victims once the small queue is small"


def test_use_in_main_is_a_second_round():
    order = S3Fifo(0)
    for row in range(3):
        order.insert(row, NO_ROW, 1, is_back=True)
    order.touch([0])
    assert [evict(order) for _ in range(3)] == [1, 2, 0]
