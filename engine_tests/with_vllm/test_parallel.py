"""One model in two workers, and one server with two engines: each has its part, and all share one store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Engine, Host, prompt, sources, tiny_model, until
from serving import Server, by_command

from workmem.engines.vllm.hashes import block_hashes
from workmem.store.selector import PurgeSelector

pytestmark = pytest.mark.timeout(600)

SIZE, BLOCKS = 32, 6
LENGTH = BLOCKS * SIZE + 1
SHAPE = {"dtype": "float32", "block_size": SIZE, "max_model_len": 512}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


class Split(Engine):
    """Its workers are processes of their own: what is known of them is what the store has."""

    def worker_rows(self, key: bytes) -> dict[int, int]:
        """Rank to the row of its part of a block."""
        assert self.host.store is not None
        catalog = self.host.store.pool.state.catalog
        return {
            catalog.space[row].layout.rank: row
            for row, frame in enumerate(catalog.frame)
            if frame is not None and catalog.key[row] == key
        }

    def saved_of(self, ids: list[int], salt: str = "") -> list[bytes]:
        keys = block_hashes(ids, SIZE, salt=salt)
        until(lambda: all(len(self.worker_rows(key)) == 2 for key in keys), "a worker saves nothing")
        self.host.settle()
        return keys

    def forget(self) -> None:
        until(self.llm.reset_prefix_cache, "blocks are never given back")


@pytest.fixture(scope="module")
def split(host: Host, tiny: Path) -> Iterator[Split]:
    with pytest.MonkeyPatch.context() as patch:
        # A core for each worker.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        made = Split(
            host,
            tiny,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            num_gpu_blocks_override=64,
            settings={"vllm.deny_s": "0.001", "vllm.prefetch_share": "0"},
            **SHAPE,
        )
        assert not made.connector._guard.off
        yield made
        made.llm.llm_engine.engine_core.shutdown()


def test_each_worker_keeps_its_part_and_both_come_back(split: Split):
    ids = prompt(LENGTH, 1)
    (first,) = split.ask(ids)
    assert sources(first) == {"computed": LENGTH}
    keys = split.saved_of(ids)
    assert set(split.worker_rows(keys[0])) == {0, 1}
    split.forget()
    (again,) = split.ask(ids)
    assert sources(again) == {"dram": BLOCKS * SIZE, "computed": 1}
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    # And from below dram, where both load aside.
    split.host.restart()
    until(lambda: split.connector._store.is_attached, "never attached again")
    until(lambda: split.host.census("connections") >= 3, "a worker never attached again")
    split.forget()
    (later,) = split.ask(ids)
    assert sources(later) == {"ssd": BLOCKS * SIZE, "computed": 1}
    assert later.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_of_which_one_worker_has_lost_its_part_is_no_hit(split: Split, rank: int):
    ids, salt = prompt(LENGTH, 10 + rank), f"rank {rank}"
    wanted = split.tokens(ids, salt=salt)
    keys = split.saved_of(ids, salt)
    store = split.host.store
    assert store is not None
    space = store.pool.state.catalog.space[split.worker_rows(keys[0])[rank]]
    gone = store.purge(PurgeSelector(root=space.root.hex()))
    assert gone.blocks == BLOCKS
    split.forget()
    (again,) = split.ask(ids, salt=salt)
    assert sources(again) == {"computed": LENGTH}
    assert list(again.outputs[0].token_ids) == wanted


@pytest.mark.parametrize("rank", [0, 1])
def test_a_page_that_is_corrupt_for_one_worker_is_computed_by_both(split: Split, rank: int):
    ids = prompt(LENGTH, 20 + rank)
    wanted = split.tokens(ids)
    keys = split.saved_of(ids)
    store = split.host.store
    assert store is not None
    catalog, row = store.pool.state.catalog, split.worker_rows(keys[3])[rank]
    frame = catalog.frame[row]
    assert frame is not None
    with store.arena.writable(frame.offset, frame.size) as memory:
        memory[catalog.space[row].header_bytes + 100] ^= 1
    split.forget()
    (again,) = split.ask(ids)
    assert sources(again) == {"dram": 3 * SIZE, "computed": LENGTH - 3 * SIZE}
    assert list(again.outputs[0].token_ids) == wanted
    # Both have computed it anew, and both keep it.
    split.saved_of(ids)
    split.forget()
    (third,) = split.ask(ids)
    assert sources(third) == {"dram": BLOCKS * SIZE, "computed": 1}
    assert list(third.outputs[0].token_ids) == wanted


def test_nothing_of_the_workers_is_left_behind(split: Split):
    assert split.host.store is not None
    until(lambda: split.host.census("leases") == 0, "a lease is left behind")
    assert split.host.census("stranded_frames") == 0
    split.host.store.audit()
    assert not split.connector._guard.off


def test_what_one_replica_computed_is_a_hit_for_the_other(host: Host, tiny: Path):
    """One server, `--data-parallel-size 2`."""
    words = [
        *("--served-model-name", "tiny", "--enforce-eager", "--data-parallel-size", "2"),
        *("--num-gpu-blocks-override", "64"),
        *(word for name, value in SHAPE.items() for word in (f"--{name.replace('_', '-')}", str(value))),
    ]
    server = Server(
        by_command(tiny, host.socket, *words, settings={}),
        host.folder,
        "replicas",
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    )
    try:
        server.wait()
        ids = prompt(LENGTH, 30)
        of = [{"X-data-parallel-rank": str(rank)} for rank in range(2)]
        first = server.complete(ids, model="tiny", headers=of[0])
        assert first.sources == {"computed": LENGTH}
        assert server.complete(ids, model="tiny", headers=of[0]).sources["vram"] == BLOCKS * SIZE
        until(lambda: host.holds(block_hashes(ids, SIZE)), "never saved")
        host.settle()
        other = server.complete(ids, model="tiny", headers=of[1])
        assert other.sources == {"dram": BLOCKS * SIZE, "computed": 1}
        assert other.tokens == first.tokens
        # And the other way.
        ids = prompt(LENGTH, 31)
        first = server.complete(ids, model="tiny", headers=of[1])
        until(lambda: host.holds(block_hashes(ids, SIZE)), "never saved")
        other = server.complete(ids, model="tiny", headers=of[0])
        assert other.sources == {"dram": BLOCKS * SIZE, "computed": 1}
        assert other.tokens == first.tokens
        assert server.metric("vllm:workmem_off") == 0
    finally:
        server.stop()
