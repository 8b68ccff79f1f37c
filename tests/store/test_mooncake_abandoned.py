"""A put into the memory of a host that has lost its power: it holds a call for a minute, and nothing else."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from workmem.store.tiers.contract import ArenaMemory, HeldPage, Outcome, PageName, PageOut
from workmem.store.tiers.mooncake import session
from workmem.store.tiers.mooncake.answers import Answers
from workmem.store.tiers.mooncake.outcomes import PutResult
from workmem.store.tiers.mooncake.peers import Peers
from workmem.store.tiers.mooncake.putting import Putting
from workmem.store.tiers.mooncake.shelf import Shelf
from workmem.store.tiers.mooncake.tier import mooncake_tier
from workmem.testing.mooncake import pool
from workmem.testing.pages import Chain, namespace
from workmem.testing.waiting import wait_until

PAGE = 4096
MEMORY = np.zeros(4 * PAGE, np.uint8)
ARENA = ArenaMemory(int(MEMORY.ctypes.data), MEMORY.nbytes)


def pages(chain: Chain) -> list[PageOut]:
    """Two blocks of `chain`, with what is in memory for bytes."""
    view = memoryview(MEMORY)
    return [
        PageOut(
            HeldPage(
                PageName(chain.root, bytes(chain.keys[at])),
                chain.space,
                bytes(chain.block(at).parent),
                at,
                PAGE,
                at,
            ),
            view[at * PAGE : (at + 1) * PAGE].toreadonly(),
        )
        for at in range(2)
    ]


class Slow:
    """A link whose call ends after somebody else has answered for its pages."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.removed: list[str] = []

    def put(self, objects, spans, *_):
        self._answers.rest(Outcome.REFUSED)
        return [PutResult.STORED] * len(objects)

    def where(self, objects):
        return ["peer"] * len(objects)

    def remove(self, names):
        self.removed += names
        return [True] * len(names)


def test_what_was_given_up_is_told_to_nobody_and_taken_out_again():
    """By the time the engine read its pages they may have been others."""
    outcomes: dict[int, Outcome] = {}
    told: list[object] = []
    answers = Answers(2, outcomes.__setitem__)
    link, shelf, counts = Slow(answers), Shelf(), Counter()
    Putting(link, ARENA, shelf, Peers(), counts, "p", 2**20).put(
        pages(Chain(namespace(), 2)), answers, told.append
    )
    assert outcomes == {0: Outcome.REFUSED, 1: Outcome.REFUSED}
    assert (told, len(shelf), counts["put_abandoned"]) == ([], 0, 1)
    (name,) = link.removed
    assert name.startswith("workmem/1/p/page/")


def test_a_call_that_does_not_end_is_given_up_before_the_store_counts_a_failure(monkeypatch):
    monkeypatch.setattr(session, "ABANDON_S", 0.3)
    with pool(16 * 2**20) as master:
        tier = mooncake_tier({"master": master.address, "capacity": "16MiB"})
        list(tier.open(ARENA))
        link = tier._session._link
        put = link.put
        try:
            monkeypatch.setattr(link, "put", lambda *all_of_it: time.sleep(1.5) or put(*all_of_it))
            found: dict[int, Outcome] = {}
            began = time.monotonic()
            tier.put(pages(Chain(namespace(), 2)), found.__setitem__)
            while len(found) < 2:
                assert time.monotonic() - began < 1.2
                time.sleep(0.01)
            # Others are not even begun: they would wait behind it.
            tier.put(
                pages(Chain(namespace(), 2, seed=1)),
                lambda index, outcome: found.update({2 + index: outcome}),
            )
            assert set(found.values()) == {Outcome.REFUSED}
            assert len(found) == 4
        finally:
            assert tier.close(10.0)
        assert tier.counts["put_abandoned"] == 1
        assert len(tier._shelf) == 0


def test_what_is_to_go_and_waits_behind_a_call_that_does_not_end_has_failed(monkeypatch):
    """As if it had gone a purge would be over, and its pages in the pool."""
    monkeypatch.setattr(session, "ABANDON_S", 0.2)
    monkeypatch.setattr(session, "PUT_S", 0.5)
    with pool(16 * 2**20) as master:
        tier = mooncake_tier({"master": master.address, "capacity": "16MiB"})
        list(tier.open(ARENA))
        link = tier._session._link
        put = link.put
        try:
            monkeypatch.setattr(link, "put", lambda *all_of_it: time.sleep(2.5) or put(*all_of_it))
            tier.put(pages(Chain(namespace(), 2)), lambda index, outcome: None)
            time.sleep(0.1)
            found: list[Outcome] = []
            tier.drop([PageName(bytes(32), bytes(32))], lambda index, outcome: found.append(outcome))
            wait_until(lambda: bool(found), 2.0)
            assert found == [Outcome.FAILED]
        finally:
            assert tier.close(10.0)


def test_what_was_given_up_before_it_began_is_not_begun():
    """Its pages may be others already."""

    class Unused:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was called")

    answers = Answers(2, lambda index, outcome: None)
    answers.rest(Outcome.REFUSED)
    Putting(Unused(), ARENA, Shelf(), Peers(), Counter(), "p", 2**20).put(
        pages(Chain(namespace(), 2)), answers, [].append
    )


def test_a_retry_does_not_read_pages_that_were_given_up():
    class Full(Slow):
        calls = 0

        def put(self, objects, spans, *_):
            self.calls += 1
            self._answers.rest(Outcome.REFUSED)
            return [PutResult.NO_ROOM] * len(objects)

    answers = Answers(2, lambda index, outcome: None)
    link = Full(answers)
    Putting(link, ARENA, Shelf(), Peers(), Counter(), "p", 2**20).put(
        pages(Chain(namespace(), 2)), answers, [].append
    )
    assert (link.calls, link.removed) == (1, [])


def test_what_could_not_be_taken_out_again_is_taken_out_before_the_next_put():
    class Away(Slow):
        is_away = True

        def remove(self, names):
            self.removed += [] if self.is_away else names
            return [not self.is_away] * len(names)

    answers = Answers(2, lambda index, outcome: None)
    link = Away(answers)
    putting = Putting(link, ARENA, Shelf(), Peers(), Counter(), "p", 2**20)
    putting.put(pages(Chain(namespace(), 2)), answers, [].append)
    assert link.removed == []
    link.is_away = False
    putting.put(pages(Chain(namespace(), 2, seed=1)), Answers(2, lambda index, outcome: None), [].append)
    assert len(link.removed) == 1


@pytest.mark.parametrize("left", [0, 1])
def test_answers_are_over_when_every_page_has_one(left):
    answers = Answers(2, lambda index, outcome: None)
    for index in range(2 - left):
        answers(index, Outcome.DONE)
    assert answers.is_over == (left == 0)
