"""What the store benchmark measures and concludes, and that it drives the store itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import harness
import numpy as np
import pytest
import store_report
from systems import System, Worker, WorkerFailed

import store as bench

sys.path.insert(0, str(bench.PEERS))

import driver
import workmem_store

SIZE, CHAIN = 64 << 10, store_report.CHAIN_ONLY


class Dict(driver.Store):
    """A store that keeps what it is told to keep."""

    def __init__(
        self, *, keeps: int = 1 << 30, reads_once: bool = False, damages: bool = False, boasts: int = 0
    ) -> None:
        super().__init__(version="1")
        self.keeps = keeps
        self.reads_once = reads_once
        self.damages = damages
        self.boasts = boasts
        self.blocks: dict[int, np.ndarray] = {}
        self.renewed = 0
        self.seen: list[int] = []
        self.repeated = 0

    def open(self, memory: driver.Memory) -> None:
        self.memory = memory

    def renew(self) -> None:
        self.renewed += 1
        self.seen.clear()

    def client(self) -> Dict:
        return self

    def read(self, blocks: range, row: int) -> int:
        found = [(i, block) for i, block in enumerate(blocks) if block in self.blocks]
        self.repeated += sum(block in self.seen for _, block in found)
        self.seen += [block for _, block in found]
        for i, block in found:
            self.memory.target[row + i] = self.blocks[block]
            self.memory.target[row + i, 0] ^= self.damages
        return len(found) + self.boasts

    def write(self, blocks: range) -> int:
        for block in blocks:
            if len(self.blocks) < self.keeps:
                self.blocks[block] = self.memory.source[block % self.memory.rows].copy()
        return len(blocks)


def opened(store: driver.Store) -> driver.Bench:
    sizes = {"ring_bytes": 64 * SIZE, "read_bytes": 64 * SIZE, "fill_bytes": 0}
    return driver.Bench(store, {"size": SIZE, **sizes})


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("op", bench.OPS)
def test_every_operation_counts_blocks_and_baselines(op: str, clients: int):
    found = opened(Dict()).measure(op, clients, 0.02, 2)
    unit = driver.BATCH if op.endswith("64") else 1
    assert found["blocks"] == found["ops"] * unit > 0
    assert found["short"] == 0
    assert found["bytes_per_s"] == pytest.approx(found["blocks"] * SIZE / found["seconds"])
    assert found["baselines"].keys() == {"memcpy", "memcpy_xxh3"}
    assert {len(rates) for rates in (found["rates"], *found["baselines"].values())} == {2}
    assert 0 < found["p50_us"] <= found["p99_us"]
    assert 0 < found["cpu_s_per_gb"] < 1000


def test_no_two_writers_store_the_same_block():
    store = Dict()
    bench = opened(store)
    before = len(store.blocks)
    written = []
    for op in ("put", "put64"):
        warm_up_and_counted = len(store.blocks)
        found = bench.measure(op, 2, 0.05, 1)
        written.append(len(store.blocks) - warm_up_and_counted >= found["blocks"])
    assert all(written)
    assert len(store.blocks) > before


def test_a_medium_that_caches_what_it_read_is_read_once_between_renewals():
    store = Dict(reads_once=True)
    found = opened(store).measure("get", 1, 0.2, 3)
    assert store.repeated == 0
    assert store.renewed == 4, "before it starts, and before each slice that counts"
    assert found["ops"] <= 3 * driver.BATCH


def test_misses_are_told_apart_from_hits():
    store = Dict(keeps=4)
    found = opened(store).measure("get", 1, 0.02, 1)
    assert found["short"] > 0
    assert found["blocks"] + found["short"] == found["ops"]


def test_a_store_that_holds_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="moved nothing"):
        opened(Dict(keeps=0)).measure("get64", 1, 0.02, 1)


@pytest.mark.parametrize("op", ["get", "get64"])
def test_wrong_bytes_are_noticed(op: str):
    opened(Dict()).verify(op)
    with pytest.raises(RuntimeError, match="is not what was stored"):
        opened(Dict(damages=True)).verify(op)
    with pytest.raises(RuntimeError, match="were said to have arrived"):
        opened(Dict(boasts=1)).verify(op)


def test_a_miss_among_hits_is_no_wrong_byte():
    store = Dict()
    bench = opened(store)
    del store.blocks[driver.READ + 3]
    bench.verify("get64")


def entry(system: str, size: int = 360 << 10, op: str = "get", **fields):
    measured = {"bytes_per_s": 4e9, "ops_per_s": 1.0, "p50_us": 2.0, "p99_us": 3.0, "cpu_s_per_gb": 0.1}
    counts = {"short": 0, "blocks": 10, "rates": [4e9, 8e9], "baselines": {"memcpy": [8e9, 8e9]}}
    return {
        "system": system,
        "size": size,
        "op": op,
        "clients": 1,
        "round": 0,
        **measured,
        **counts,
        **fields,
    }


def test_ratios_are_taken_slice_by_slice():
    (row,) = store_report.summarise({"a": entry("redis", short=30)})
    assert row["of"]["memcpy"] == {"median": 0.75, "min": 0.5, "max": 1.0, "n": 2}
    assert row["short"] == 0.75


def test_a_failed_operation_is_a_row_with_its_reason():
    failed = {"system": "redis", "size": 1, "op": "put", "clients": 1, "round": 0, "skipped": "no answer"}
    (row,) = store_report.summarise({"a": failed})
    assert row["skipped"] == ["no answer"]
    assert "bytes_per_s" not in row
    assert store_report.reaches([row], {}) == store_report.against([row], {"redis": "dram"}) == []


def test_others_are_compared_within_their_medium():
    rows = store_report.summarise(
        {
            "a": entry("workmem dram"),
            "b": entry("redis", bytes_per_s=1e9, rates=[1e9, 1e9]),
            "c": entry("lmdb disk"),
            "d": entry("workmem dram", size=2 << 20),
        }
    )
    media = {"workmem dram": "dram", "redis": "dram", "lmdb disk": "ssd"}
    (found,) = store_report.against(rows, media)
    assert (found["against"], found["ratio"], found["levelled"]) == ("redis", 4.0, 6.0)
    assert store_report.behind([found]) == []
    assert store_report.behind([found | {"ratio": 0.5}]) == ["redis: 360 KiB get x1 0.50"]


def test_the_reach_of_dram_is_a_checked_copy_and_that_of_ssd_the_better_raw_rate():
    checked = {"memcpy": [8e9, 8e9], "memcpy_xxh3": [5e9, 5e9]}
    raw = {"memcpy": [8e9, 8e9], "raw": [2e9, 2e9], "raw_3_at_once": [5e9, 5e9]}
    entries = {
        "small": entry("workmem dram", size=64 << 10, baselines=checked),
        "dram": entry("workmem dram", baselines=checked),
        "ssd": entry("workmem ssd", size=2 << 20, op="get64", rates=[4e9, 4e9], baselines=raw),
    }
    found = {reach["what"]: reach for reach in store_report.reaches(store_report.summarise(entries), entries)}
    assert found["workmem dram get x1 of 360 KiB, of memcpy and xxh3-64"]["measured"] == pytest.approx(1.2)
    assert found["workmem dram get x1 of 360 KiB, of memcpy and xxh3-64"]["is_met"]
    assert found["workmem ssd get64 x1 of 2048 KiB, of the raw disk"]["measured"] == pytest.approx(0.8)
    assert not found["workmem ssd get64 x1 of 2048 KiB, of the raw disk"]["is_met"]
    assert len(found) == 2


@pytest.mark.parametrize(
    ("size", "op", "is_split"),
    [(2 << 20, "get", False), (2 << 20, "put", False), (8 << 20, "get", True), (8 << 20, "put", True)],
)
def test_whatever_is_longer_than_a_request_is_held_to_several_at_once(
    size: int,
    op: str,
    is_split: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(workmem_store, "RAW_BYTES", 16 << 20)
    raw = workmem_store.RawFile(tmp_path / "raw", SimpleNamespace(size=size))
    found = raw.baselines(op, 1)
    assert ("raw_3_at_once" in found) is is_split
    assert "raw_3_at_once" in raw.baselines(f"{op}64", 1)
    assert {make(0)() for make in found.values()} == {size}


def test_growth_is_counted_from_a_store_of_few_records():
    def opened(count: int, private: int, seconds: float):
        starts = [
            {"seconds": seconds, "private_bytes": private},
            {"seconds": seconds, "private_bytes": 10**10},
        ]
        return f"records|{count}", {"found": {"starts": starts}}

    many = 1_000_000
    entries = dict(
        [opened(store_report.CHAIN_ONLY, 10**6, 0.2), opened(many, 10**6 + 250 * (many - 512), 4.0)]
    )
    (line,) = store_report.many_blocks(entries)
    assert (line["start_s"], line["bytes_per_block"]) == (4.0, 250.0)
    replay, growth = store_report.growth(entries)
    assert (replay["measured"], replay["is_met"]) == (4.0, False)
    assert (growth["measured"], growth["is_met"]) == (250.0, True)


def test_lookups_are_held_to_the_echo():
    inside = {"lookup_512": {"p50_us": 90.0}}
    outside = [{"blocks": 32, "ratio_p50": 4.0}, {"blocks": 512, "ratio_p50": 8.0}]
    lookup, few, many = store_report.reaches(
        [], {"lookups": {"found": inside}, "host_latency": {"found": outside}}
    )
    assert lookup["is_met"]
    assert (few["measured"], few["is_met"]) == (4.0, False)
    assert (many["measured"], many["is_met"]) == (8.0, True)


@pytest.fixture
def worker(tmp_path: Path, request) -> Iterator[Worker]:
    options = {"threads": 2, "folder": str(tmp_path), "dram_bytes": 32 << 20, **request.param}
    system = System("workmem", Path(sys.executable), str(bench.PEERS / "workmem_store.py"), options)
    worker = Worker(system, tmp_path / "log", 60.0)
    yield worker
    worker.close()


@pytest.mark.parametrize(
    "worker",
    [{"medium": "dram"}, {"medium": "ssd"}, {"medium": "dram", "host": True}],
    ids=["dram", "ssd", "host"],
    indirect=True,
)
def test_the_store_itself_is_driven(worker: Worker, tmp_path: Path):
    sizes = {"ring_bytes": 64 * SIZE, "read_bytes": 64 * SIZE, "fill_bytes": 0}
    worker.ask(60.0, do="open", size=SIZE, **sizes)
    for op in bench.OPS:
        found = worker.ask(60.0, do="measure", op=op, clients=1, seconds=0.02, slices=1)
        assert found["blocks"] > 0
        assert found["short"] == 0
    with pytest.raises(WorkerFailed, match="KeyError"):
        worker.ask(60.0, do="measure", op="get")
    worker.ask(60.0, do="close")
    assert not (tmp_path / "workmem").exists()


def test_a_store_of_many_records_opens_and_finds_its_first_context(tmp_path: Path):
    found = bench.records(tmp_path, 2000)
    assert [start["pages"] for start in found["starts"]] == [2000] * 3
    assert all(start["seconds"] > 0 for start in found["starts"])


def test_a_tenant_of_many_records_is_purged_while_another_goes_on(tmp_path: Path):
    found = bench.purge(tmp_path, 2000)
    assert (found["blocks"], found["pages_left"]) == (2000, 512)
    assert 0 < found["purge_s"] <= found["gone_from_disk_s"]
    for when in ("other_before", "other_meanwhile"):
        for what in ("lookup", "lease"):
            waits = found[when][what]
            assert 0 < waits["p50_us"] <= waits["p99_us"] <= waits["max_us"]
    assert list(tmp_path.iterdir()) == []
    (line,) = store_report.many_blocks({"purge|2000": {"found": found}})
    assert line["said"].startswith("purge of 2000 blocks: ")


def test_only_what_depends_on_the_number_of_blocks_is_measured(tmp_path: Path, monkeypatch):
    def measured(_, count: int) -> dict[str, int]:
        return {"blocks": count}

    monkeypatch.setattr(bench, "records", measured)
    monkeypatch.setattr(bench, "purge", measured)
    out = tmp_path / "found.json"
    monkeypatch.setattr(bench, "summarise", lambda _: [])
    monkeypatch.setattr(bench, "reaches", lambda *_: [])
    monkeypatch.setattr(bench, "many_blocks", lambda _: [])
    words = ["store.py", "--records", "--folder", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    bench.main()
    once = json.loads(out.read_text())["once"]
    assert {name: made["found"]["blocks"] for name, made in once.items()} == {
        f"records|{CHAIN}": CHAIN,
        "records|1000000": 1_000_000,
        "records|5000000": 5_000_000,
        "purge|1000000": 1_000_000,
    }


def test_prefixes_are_timed_at_both_lengths():
    found = bench.lookups(0.01)
    for n in (32, 512):
        for what in ("hashing", "lookup", "lease_and_release"):
            assert found[f"{what}_{n}"]["p50_us"] > 0


def test_prefixes_are_timed_from_another_process():
    found = bench.host_latency(20)
    assert [row["blocks"] for row in found] == [32, 512]
    assert all(row["lease_us"]["p50"] > row["echo_us"]["p50"] > 0 for row in found)


def test_only_systems_whose_place_is_given_are_asked_for(tmp_path: Path):
    arguments = bench.parsed(["--quick", "--lmdb-python", "/x/python"])
    names = [system.name for system in bench.systems_of(arguments, 1 << 30, tmp_path)]
    assert names == ["workmem dram", "workmem host", "lmdb memory", "workmem ssd", "lmdb disk"]


def test_a_system_that_cannot_start_is_absent_with_its_error(tmp_path: Path):
    mode = bench.SMOKE._replace(records=(CHAIN,), sizes=(SIZE,))
    system = System("redis", Path("/nowhere/python"), "redis_socket.py", {"threads": 2, "medium": "dram"})
    journal = bench.Journal(tmp_path / "run.partial.jsonl", {})
    run = bench.Bench(mode, [system], tmp_path, journal, bench.Console(quiet=True))
    for once in ("disk", "lookups", "host_latency", f"records|{CHAIN}", f"purge|{CHAIN}"):
        journal.record(once, skipped="not here")
    run.run()
    out = tmp_path / "result.json"
    harness.write_result(out, {"absent": {"redis": run.absent["redis"], "a": {"b": ["/x/y/z --at /q/w"]}}})
    told = json.loads(out.read_text())["absent"]
    assert told["redis"].startswith("python redis_socket.py: ")
    assert "No such file" in told["redis"]
    assert "/nowhere" not in told["redis"]
    assert told["a"] == {"b": ["z --at w"]}, "whatever holds it"
    json.dumps(journal.done)
