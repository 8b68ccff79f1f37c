"""What was computed once comes back: tokens equal to those of vLLM's own prefix hit of the same split."""

from __future__ import annotations

import pytest
from harness import prompt, sources, wait_until_attached

# Where the split is another than the reference's by a few tokens, bf16 rounds otherwise.
ENGINE = {"dtype": "float32", "max_num_batched_tokens": 256}


def own_hit(engine, ids: list[int]) -> list[int]:
    """The reference: computed, then hit in vLLM's own cache."""
    engine.ask(ids)
    return engine.tokens(ids)


@pytest.mark.parametrize("length", [257, 256, 300, 31, 33])
def test_from_dram(engine, length: int):
    ids = prompt(length, length)
    wanted = own_hit(engine, ids)
    engine.reset()
    (again,) = engine.ask(ids)
    full = (length - 1) // 32 * 32
    assert list(again.outputs[0].token_ids) == wanted
    assert sources(again) == {"computed": length - full} | ({"dram": full} if full else {})


@pytest.mark.parametrize("length", [257, 256])
def test_from_ssd_after_a_restart_of_the_store(engine, length: int):
    ids = prompt(length, 1000 + length)
    wanted = own_hit(engine, ids)
    engine.reset()
    engine.host.restart()
    wait_until_attached(engine)
    (again,) = engine.ask(ids)
    assert list(again.outputs[0].token_ids) == wanted
    found = sources(again)
    assert found["computed"] == length - (found.get("ssd", 0) + found.get("dram", 0))
    assert found["computed"] <= 1


def test_generated_tokens_are_part_of_the_next_turn(engine):
    ids = prompt(100, 5)
    (first,) = engine.ask(ids, n=64)
    turn = [*ids, *first.outputs[0].token_ids, *prompt(10, 6)]
    engine.reset()
    (second,) = engine.ask(turn)
    assert sources(second)["dram"] == 160


def test_salts_never_meet(engine):
    ids = prompt(200, 7)
    engine.ask(ids, salt="one")
    engine.reset()
    (other,) = engine.ask(ids, salt="two")
    assert sources(other) == {"computed": 200}
    (same,) = engine.ask(ids, salt="one")
    assert sources(same) == {"dram": 192, "computed": 8}


def test_one_prefix_serves_many_at_once(engine):
    head = prompt(160, 8)
    engine.ask(head)
    engine.reset()
    answers = engine.ask(*([*head, *prompt(40, seed)] for seed in range(20, 26)))
    for answer in answers:
        found = sources(answer)
        assert found.get("dram", 0) + found.get("vram", 0) == 160


def test_a_reset_of_external_caches_is_a_new_epoch(engine):
    ids = prompt(200, 9)
    engine.ask(ids)
    engine.saved()
    assert engine.core.reset_prefix_cache(reset_connector=True)
    (again,) = engine.ask(ids)
    assert sources(again) == {"computed": 200}
    engine.reset()
    (later,) = engine.ask(ids)
    assert sources(later)["dram"] == 192


def test_more_than_a_step_can_hold_is_loaded_at_once(engine):
    ids = prompt(1500, 10)
    wanted = own_hit(engine, ids)
    engine.reset()
    (again,) = engine.ask(ids)
    assert list(again.outputs[0].token_ids) == wanted
    assert sources(again)["dram"] == 1472


def test_a_context_that_is_longer_than_dram_is_loaded_in_windows(engine):
    """18 MiB through 16, a part of them after the other. Eight tokens behind whole blocks: the last of those may be loaded, too."""
    ids = prompt(808, 11)
    wanted = own_hit(engine, ids)
    engine.reset()
    engine.host.dram, before = "16MiB", engine.host.dram
    engine.host.restart()
    wait_until_attached(engine)
    (again,) = engine.ask(ids)
    found = sources(again)
    assert found["computed"] == 808 - 800
    assert found["ssd"] >= 768 // 2
    assert list(again.outputs[0].token_ids) == wanted
    assert engine.host.store.dram_capacity_bytes() <= 16 << 20
    engine.host.dram = before
    engine.host.restart()
    wait_until_attached(engine)


def test_a_page_that_cannot_be_saved_holds_nobody_up(engine):
    """Else vLLM drops what a preempted request was about to say (`Scheduler` reads it of every connector)."""
    assert engine.connector.requires_kv_delivery is False
    assert engine.worker.requires_kv_delivery is False


def test_nothing_is_left_behind(engine):
    """Tracked requests, pending copies and leases end with the requests."""
    engine.saved()
    side = engine.connector._scheduler
    assert not side._requests
    assert side._prefetching.held_bytes == 0
    engine.host.store.audit()
    assert not engine.connector._store._keeper.link.leases.live()
    assert not engine.worker._store._keeper.link.leases.live()


def test_the_tail_behind_a_hit_is_saved_and_told_though_one_step_computes_it(engine):
    """An answer of one token is over before vLLM tells us how the loads of its step ended."""
    begun = prompt(129, 71)
    engine.ask(begun)
    engine.reset()
    longer = [*begun[:128], *prompt(65, 72)]
    (answer,) = engine.ask(longer, n=1)
    assert sources(answer) == {"dram": 128, "computed": 65}
    # A server makes a step more to tell its workers who has ended; an `LLM` stops, and makes it with its next request.
    engine.ask(prompt(17, 73), n=1)
    engine.reset()
    assert sources(engine.ask(longer)[0]) == {"dram": 192, "computed": 1}
