"""Every page that is offered is taken or told that it was dropped, once."""

from types import SimpleNamespace

import pytest

from workmem.core.keys import BlockKey
from workmem.store.contract import BlockId, PageWrite, SaveState
from workmem.store.save_queue import SaveQueue

SPACE, OTHER = SimpleNamespace(), SimpleNamespace()


@pytest.fixture
def told():
    return []


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def queue(dropped):
    return SaveQueue(4, lambda count, why: dropped.append((count, why)))


def pages(told, count, first=0, workflow=""):
    def page(number):
        block = BlockId(BlockKey(bytes([number]) * 32), bytes(32), (), 0)
        return PageWrite(block, lambda _: None, lambda state: told.append((number, state)), workflow=workflow)

    return [page(number) for number in range(first, first + count)]


def numbers(taken):
    return [page.block.key[0] for page in taken]


def test_pages_of_one_namespace_and_workflow_are_taken_together_in_order(queue, told):
    queue.put(SPACE, pages(told, 1))
    queue.put(SPACE, pages(told, 1, first=1, workflow="w"))
    queue.put(OTHER, pages(told, 2, first=2, workflow="w"))
    found = [queue.take(lambda _: 8) for _ in range(3)]
    assert [(space, numbers(taken)) for space, taken in found] == [
        (SPACE, [0]),
        (SPACE, [1]),
        (OTHER, [2, 3]),
    ]
    assert queue.depth == 0
    assert told == []


def test_no_more_are_taken_than_may_go_together(queue, told):
    queue.put(SPACE, pages(told, 4))
    assert numbers(queue.take(lambda _: 3)[1]) == [0, 1, 2]
    assert queue.depth == 1


def test_pages_past_the_bound_come_without_a_namespace_to_be_told(queue, told, dropped):
    queue.put(SPACE, pages(told, 6))
    assert dropped == [(2, "the queue is full")]
    assert queue.depth == 4
    assert numbers(queue.take(lambda _: 8)[1]) == [0, 1, 2, 3]
    space, refused = queue.take(lambda _: 8)
    assert space is None
    assert numbers(refused) == [4, 5]
    assert told == []


def test_it_is_drained_when_what_was_taken_is_done(queue, told):
    assert queue.drain(0)
    queue.put(SPACE, pages(told, 1))
    queue.take(lambda _: 8)
    assert not queue.drain(0)
    queue.close()
    assert queue.take(lambda _: 8) == (None, [])
    assert queue.drain(0)


def test_closing_drops_what_waits_and_what_comes(queue, told, dropped):
    queue.put(SPACE, pages(told, 2))
    queue.close()
    queue.put(SPACE, pages(told, 1, first=2))
    assert told == [(number, SaveState.DROPPED) for number in range(3)]
    assert dropped == [(2, "the store is closed"), (1, "the store is closed")]
    assert queue.take(lambda _: 8) == (None, [])
