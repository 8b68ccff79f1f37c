"""What the vLLM benchmark counts and concludes, and that a run goes on where it was; vLLM itself is scripted."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm_report
import vllm_systems
import vllm_ttft
from harness import Journal
from rich.console import Console
from systems import Worker, WorkerFailed
from vllm_report import Sample
from vllm_systems import ALONE, LMCACHE, MOONCAKE, NATIVE, OURS, Kind, Place

BLOCK = 128


def sample(system: str, source: str, pair: int, ttft_s: float, **more) -> Sample:
    wanted = 0 if source == "cold" else 1024
    fields = {
        "system": system,
        "source": source,
        "prompt_tokens": 1031,
        "pair": pair,
        "ttft_s": ttft_s,
        "tpot_s": 0.04 if source == "cold" else None,
        "cached": wanted,
        "wanted": wanted,
        "sources": None,
        "token_ids": [1, 2, 3],
    }
    return Sample(**fields | more)


# -- what is concluded


@pytest.mark.parametrize(
    ("measured", "is_pure"),
    [
        (sample(NATIVE, "dram", 0, 1.0), True),
        (sample(NATIVE, "dram", 0, 1.0, cached=896), False),
        (sample(OURS, "dram", 0, 1.0, sources={"dram": 1024, "computed": 7}), True),
        (sample(OURS, "dram", 0, 1.0, sources={"dram": 512, "ssd": 512}), False),
        (sample(OURS, "ssd", 0, 1.0, sources={"dram": 1024}), False),
        (sample(OURS, "own", 0, 1.0, sources={"vram": 1024}), True),
        (sample(OURS, "cold", 0, 1.0, sources={"computed": 1031}), True),
        (sample(ALONE, "cold", 0, 1.0, cached=128), False),
    ],
)
def test_only_what_came_whole_from_its_place_counts(measured: Sample, is_pure: bool):  # noqa: FBT001
    assert measured.is_pure is is_pure


def test_the_bound_is_that_of_a_paired_t_test_on_logarithms():
    found = vllm_report.paired([(1.1, 1.0), (0.9, 1.0), (1.0, 1.0), (1.05, 1.0)])
    logs = [math.log(x) for x in (1.1, 0.9, 1.0, 1.05)]
    mean = sum(logs) / 4
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / 3 / 4)
    assert found["ratio"] == pytest.approx(math.exp(mean))
    # 2.353: what Student's t of 3 degrees of freedom stays below 95 times in 100.
    assert found["upper"] == pytest.approx(math.exp(mean + 2.353 * error))
    assert found["pairs"] == 4


def test_one_pair_has_no_bound():
    assert vllm_report.paired([(2.0, 1.0)])["upper"] is None
    assert vllm_report.paired([]) == {}


def test_quantiles_of_many_pairs_go_on_from_the_table():
    assert vllm_report.quantile(31) == pytest.approx(1.6955, abs=2e-3)
    assert vllm_report.quantile(120) == pytest.approx(1.6577, abs=1e-3)
    values = [vllm_report.quantile(n) for n in range(1, 60)]
    assert values == sorted(values, reverse=True)


def tier(source: str, times: dict[str, float], pairs: int = 20) -> list[Sample]:
    return [
        sample(name, source, k, seconds * (1 + k / 100), sources={source: 1024} if name == OURS else None)
        for k in range(pairs)
        for name, seconds in times.items()
    ]


def test_a_tier_is_held_to_the_best_peer_alone():
    rows = vllm_report.ratios(tier("dram", {OURS: 0.05, NATIVE: 0.10, LMCACHE: 0.04}))
    by_peer = {row["against"]: row for row in rows}
    assert "bound" not in by_peer[NATIVE]
    assert by_peer[LMCACHE]["bound"] == vllm_report.HIT_BOUND
    assert by_peer[LMCACHE]["ratio"] == pytest.approx(1.25)
    assert not by_peer[LMCACHE]["is_met"]
    assert by_peer[LMCACHE]["is_proof"]


def test_few_pairs_prove_nothing():
    (row,) = vllm_report.ratios(tier("ssd", {OURS: 0.05, NATIVE: 0.10}, pairs=5))
    assert row["is_met"]
    assert not row["is_proof"]


def test_cold_is_held_against_vllm_alone_in_both_times():
    samples = [sample(ALONE, "cold", k, 1.0) for k in range(20)]
    samples += [sample(NATIVE, "cold", k, 0.1) for k in range(20)]
    samples += [
        sample(OURS, "cold", k, 1.01, tpot_s=0.05, sources={"computed": 1031}, saved_s=0.2) for k in range(20)
    ]
    ttft, tpot = vllm_report.ratios(samples)
    assert (ttft["of"], ttft["against"], ttft["is_met"]) == ("ttft", ALONE, True)
    assert (tpot["of"], tpot["bound"], tpot["is_met"]) == ("tpot", vllm_report.COLD_BOUND, False)
    (row,) = [row for row in vllm_report.summarise(samples) if row["system"] == OURS]
    assert row["saved_of_prefill"]["median"] == pytest.approx(0.2 / 1.01)


def test_impure_samples_are_in_no_row_and_no_pair():
    samples = [*tier("dram", {OURS: 0.05, NATIVE: 0.10}), sample(NATIVE, "dram", 20, 9.0, cached=0)]
    assert max(row["ttft_s"]["max"] for row in vllm_report.summarise(samples)) < 1


def test_answers_are_compared_with_vllm_alone_at_the_same_split():
    samples = [
        sample(ALONE, "cold", 0, 1.0, token_ids=[1, 2, 3, 4]),
        sample(ALONE, "own", 0, 1.0, token_ids=[7, 8, 9]),
        sample(NATIVE, "dram", 0, 1.0, token_ids=[7, 8, 9]),
        sample(LMCACHE, "dram", 0, 1.0, token_ids=[7, 8, 0]),
        sample(LMCACHE, "cold", 0, 1.0, token_ids=[1, 2, 3, 4]),
    ]
    (found,) = vllm_report.differing(samples)
    assert (found["system"], found["source"], found["got"]) == (LMCACHE, "dram", [7, 8, 0])


# -- how systems are started


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, tmp_path, "wm-bench-x")


def test_a_peer_without_a_python_is_absent_and_says_why():
    found = {kind.name: kind for kind in vllm_systems.kinds(Path("vp"), None, None)}
    assert list(found) == [ALONE, OURS, NATIVE, LMCACHE, MOONCAKE]
    assert found[LMCACHE].why_absent == "--lmcache-python was not given"
    assert not found[NATIVE].why_absent


def test_all_memory_tiers_have_the_same_size(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_systems, "packages_of", lambda python: [str(python)])
    kinds = vllm_systems.kinds(Path("vp"), Path("env/bin/python"), Path("other/bin/python"))
    options = {kind.name: kind.start({"model": "m"}, place) for kind in kinds}
    ours, lmcache = (" ".join(options[name]["servers"][0]["command"]) for name in (OURS, LMCACHE))
    assert f"store.dram.bytes={vllm_systems.DRAM_GIB}GiB" in ours
    assert f"--l1-size-gb {vllm_systems.DRAM_GIB}" in lmcache
    assert lmcache.startswith("env/bin/python env/bin/lmcache server")
    native = options[NATIVE]["kv_transfer_config"]["kv_connector_extra_config"]
    assert native["cpu_bytes_to_use"] == vllm_systems.DRAM_GIB << 30
    moon = json.loads((place.folder / "mooncake.json").read_text())
    assert moon["global_segment_size"] == f"{vllm_systems.DRAM_GIB}GB"
    assert "kv_transfer_config" not in options[ALONE]


def test_our_configuration_is_the_one_that_the_launcher_adds(place: Place):
    from workmem.engines.vllm import launch

    source = Path(launch.__file__).read_text()
    options = vllm_systems.ours({}, place)
    assert options["llm"]["prefix_caching_hash_algo"] in source
    for name in ("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"):
        assert f'"{options["kv_transfer_config"][name]}"' in source


@pytest.mark.parametrize(
    ("flags", "dtype"), [(["avx2", "fma"], "float32"), (["avx512f", "avx512_bf16"], "bfloat16")]
)
def test_every_vllm_computes_in_what_this_cpu_does_fastest(flags: list[str], dtype: str):
    assert vllm_systems.fastest_dtype(flags) == dtype


def test_what_is_left_in_shared_memory_is_swept_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_systems, "SHARED_MEMORY", tmp_path)
    (tmp_path / "vllm_offload_wm-bench-1.mmap").touch()
    (tmp_path / "another").touch()
    vllm_systems.sweep("wm-bench-1")
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


# -- a whole run


class Machine:
    """What outlives scripted engines: their disks, the requests so far, and at which of them the bench dies."""

    def __init__(self) -> None:
        self.disks: dict[str, set[int]] = {}
        self.asked = 0
        self.dies_at = 0
        self.waited = 0
        """Times that it was waited for until all was quiet."""
        self.late = 0
        """Times that saving is not through yet when the prefix cache is emptied."""
        self.refused = ""
        self.running: set[str] = set()


class ScriptedWorker:
    """An engine that knows where a prompt would come from."""

    def __init__(self, machine: Machine, system, log: Path, start_timeout_s: float) -> None:
        if system.name == machine.refused:
            raise WorkerFailed("ended: no such module")
        assert system.name not in machine.running
        machine.running.add(system.name)
        self._machine, self.system = machine, system
        self._tiers = {"vram": set(), "dram": set(), "ssd": set(machine.disks.setdefault(system.name, set()))}
        self.versions = {"vllm": "0", "block_tokens": BLOCK}

    def resume(self) -> None: ...

    def pause(self) -> None: ...

    def close(self) -> None:
        self._machine.running.discard(self.system.name)

    def wait_until_idle(self, timeout_s: float) -> None:
        self._machine.waited += 1

    def ask(self, timeout_s: float, **request):
        machine, tiers = self._machine, self._tiers
        if request["do"] == "reset":
            tiers["vram"].clear()
            if machine.late:
                machine.late -= 1
                tiers["dram"].clear()
                tiers["ssd"].clear()
            return {"is_empty": True}
        if request["do"] != "ask":
            return {"saved_s": 0.1}
        machine.asked += 1
        if machine.asked == machine.dies_at:
            raise KeyboardInterrupt
        prompt, n = request["prompt"][0], len(request["prompt"])
        found = next((name for name in ("vram", "dram", "ssd") if prompt in tiers[name]), "")
        for held in tiers.values():
            held.add(prompt)
        machine.disks[self.system.name].add(prompt)
        cached = (n - 1) // BLOCK * BLOCK if found else 0
        sources = {found: cached, "computed": n - cached} if found else {"computed": n}
        return {
            "ttft_s": 0.1,
            "tpot_s": 0.01,
            "cached": cached,
            "sources": sources if self.system.name == OURS else None,
            "token_ids": [1] * request["max_tokens"],
        }


class Texts:
    """Prompts that tell themselves apart."""

    def __init__(self) -> None:
        self._made = itertools.count(1)

    def prompt(self, tokens: int) -> list[int]:
        return [next(self._made)] * tokens


KINDS = [
    Kind(ALONE, (), lambda shared, _: shared, Path("p")),
    Kind(OURS, ("dram", "ssd"), lambda shared, _: shared, Path("p")),
    Kind(MOONCAKE, ("dram",), lambda shared, _: shared, Path("p"), is_paused=False),
    Kind(LMCACHE, ("dram", "ssd"), lambda shared, _: shared, Path("p"), why_absent="not given"),
]
MODE = vllm_ttft.Mode("test", (263, 519), 3, 100.0)
CELLS = 2 + 4 + 3
"""Of a pair and length: vLLM has cold and own; ours both tiers as well, Mooncake one."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(vllm_ttft, "Worker", lambda *given: ScriptedWorker(found, *given))
    return found


def bench_in(folder: Path, mode=MODE) -> vllm_ttft.Bench:
    journal = Journal(folder / "run.partial.jsonl", {})
    return vllm_ttft.Bench(mode, KINDS, {"threads": 1}, Texts(), folder, journal, Console(quiet=True))


def test_a_run_measures_every_cell_of_every_pair_once(tmp_path: Path, machine: Machine):
    bench = bench_in(tmp_path)
    bench.run()
    assert machine.waited == 3 * MODE.pairs * len(MODE.prompt_tokens), "after each prompt that was computed"
    assert len(bench.samples) == len(MODE.prompt_tokens) * MODE.pairs * CELLS
    assert all(sample.is_pure for sample in bench.samples)
    assert bench.absent == {LMCACHE: {"error": "not given"}}
    assert not machine.running
    asked = machine.asked
    bench_in(tmp_path).run()
    assert machine.asked == asked, "nothing is measured twice"


@pytest.mark.parametrize("dies_at", [1, 3, 8, 13, 19, 26, 34, 47, 56, 61])
def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path: Path, machine: Machine, dies_at: int):
    machine.dies_at = dies_at
    with pytest.raises(KeyboardInterrupt):
        bench_in(tmp_path).run()
    assert not machine.running
    bench = bench_in(tmp_path)
    bench.run()
    impure = [sample for sample in bench.samples if not sample.is_pure]
    assert len(bench.samples) == len(MODE.prompt_tokens) * MODE.pairs * CELLS
    assert not impure


def test_what_runs_behind_an_answer_ends_before_others_are_measured():
    busy = "import time; until = time.monotonic() + 1.0\nwhile time.monotonic() < until: pass\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", busy], start_new_session=True) as process:
        worker = object.__new__(Worker)
        worker._process = process
        begin = time.monotonic()
        worker.wait_until_idle(30.0)
        took_s = time.monotonic() - begin
        process.kill()
    assert 0.8 < took_s < 20.0


def test_a_hit_in_memory_waits_until_it_was_saved(tmp_path: Path, machine: Machine):
    bench = bench_in(tmp_path)
    machine.late = 4
    bench.run()
    assert all(sample.is_pure for sample in bench.samples)


def test_what_never_was_saved_is_kept_as_impure(tmp_path: Path, machine: Machine):
    machine.late = 10_000
    bench = bench_in(tmp_path)
    bench.run()
    by_source = {s.source: {x.is_pure for x in bench.samples if x.source == s.source} for s in bench.samples}
    assert by_source["dram"] == {False}
    assert by_source["cold"] == by_source["own"] == {True}


def test_a_system_that_cannot_start_is_absent_with_what_was_tried(tmp_path: Path, machine: Machine):
    machine.refused = OURS
    bench = bench_in(tmp_path)
    bench.run()
    assert bench.absent[OURS]["error"] == "at its start: ended: no such module"
    assert bench.absent[OURS]["python"] == "p"
    assert {sample.system for sample in bench.samples} == {ALONE, MOONCAKE}


def test_without_time_nothing_is_measured_and_it_is_said(tmp_path: Path, machine: Machine):
    bench = bench_in(tmp_path, MODE._replace(budget_s=0.0))
    bench.run()
    assert not bench.samples
    assert bench.skipped
    assert not machine.running


# -- the worker, over a scripted vLLM


class ScriptedLLM:
    """Steps as an engine does: a token for each request that runs."""

    def __init__(self, **given) -> None:
        self.given = given
        self.llm_engine = self
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK))
        self.most = 0
        self.held = 0
        """Steps until a connector has let go of the blocks it saves."""
        self._running: dict[str, list[int]] = {}
        self._wanted = 0

    def reset_prefix_cache(self) -> bool:
        return self.held <= 0

    def add_request(self, name: str, prompt: dict, sampling) -> None:
        self._running[name] = []
        self._wanted = sampling.max_tokens
        self.most = max(self.most, len(self._running))

    def step(self):
        outputs = []
        self.held -= 1
        for name, ids in list(self._running.items()):
            ids.append(int(name))
            is_over = len(ids) == self._wanted
            if is_over:
                del self._running[name]
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    finished=is_over,
                    outputs=[SimpleNamespace(token_ids=list(ids))],
                    num_cached_tokens=128,
                    kv_transfer_params={"workmem": {"tokens": {"dram": 128}}} if name == "0" else None,
                )
            )
        return outputs


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch):
    workers = Path(vllm_ttft.__file__).parent / "workers"
    monkeypatch.syspath_prepend(str(workers))
    fake = SimpleNamespace(LLM=ScriptedLLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    import vllm_cached

    options = {"model": "m", "dtype": "bfloat16", "max_context": 512, "nudge": [1]}
    return vllm_cached.Engine(options | {"kv_transfer_config": {"kv_connector": "C"}, "blocks": 9}, None)


def test_the_worker_hands_its_configuration_to_vllm(engine):
    given = engine._llm.given
    assert given["kv_transfer_config"] == {"kv_connector": "C"}
    assert given["num_gpu_blocks_override"] == 9
    assert engine.block_tokens == BLOCK


def test_the_worker_says_where_tokens_came_from(engine):
    first = engine.handle({"do": "ask", "prompt": [1, 2], "max_tokens": 3})
    assert first["token_ids"] == [0, 0, 0]
    assert first["sources"] == {"dram": 128}
    assert first["ttft_s"] > 0
    assert first["tpot_s"] > 0
    second = engine.handle({"do": "ask", "prompt": [1, 2], "max_tokens": 1})
    assert (second["sources"], second["tpot_s"], second["cached"]) == (None, None, 128)


def test_the_worker_keeps_only_so_many_in_flight(engine):
    prompts = [[1]] * 5
    answers = engine.handle({"do": "fleet", "prompts": prompts, "max_tokens": 2, "in_flight": 2})["answers"]
    assert [answer["token_ids"] for answer in answers] == [[n, n] for n in range(5)]
    assert engine._llm.most == 2


def test_the_worker_empties_the_cache_once_its_blocks_are_let_go(engine, monkeypatch: pytest.MonkeyPatch):
    import vllm_cached

    monkeypatch.setattr(vllm_cached, "QUIET_S", 0.02)
    engine._llm.held = 5
    assert engine.handle({"do": "reset"}) == {"is_empty": True}
    engine._llm.held = 10**9
    monkeypatch.setattr(vllm_cached, "SETTLE_S", 0.01)
    assert engine.handle({"do": "reset"}) == {"is_empty": False}
