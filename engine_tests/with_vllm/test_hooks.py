"""Every hook of the connector, with a bug of ours in it: that side is off, and vLLM answers as it would alone.

A hook that is added and not listed here fails `test_every_hook_has_its_bug`.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from harness import Engine, prompt, sources, tiny_model, wait_until_attached
from prometheus_client import Counter, Gauge, Histogram

from workmem.plugins.vllm import WorkmemConnector

LENGTH = 257
SETTINGS = {"vllm.deny_s": "0.001", "vllm.prefetch_share": "0"}
ENGINE = {
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 64,
    "max_model_len": 1024,
    "disable_log_stats": False,
    "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
    "settings": SETTINGS,
    # So that an answer is the same whatever was loaded.
    "dtype": "float32",
}

SCHEDULER, WORKER = "scheduler", "worker"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In its place one that answers in no time."""
    return tiny_model(tmp_path_factory.mktemp("tiny"))


class Bug(NamedTuple):
    """On which side a hook is called, and in what of ours its bug is: names of attributes, from the connector on."""

    side: str
    inside: tuple[str, ...]
    called: Callable[[Engine], object] | None = None
    """What makes vLLM call it; None: any request does."""
    goes_off: bool = True


def resets(engine: Engine) -> None:
    assert engine.llm.reset_prefix_cache(reset_connector=True)


def binds(engine: Engine) -> None:
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    engine.connector.bind_gpu_block_pool(
        SimpleNamespace(reset_prefix_cache=None, num_gpu_blocks=0, real=pool)
    )


def registers(engine: Engine) -> None:
    engine.worker.register_kv_caches({})


def ends_block(engine: Engine) -> None:
    assert engine.connector.has_pending_block_frees() is False


def gives_way(engine: Engine) -> None:
    assert engine.connector.blocks_that_give_way() == 0


def sleeps(engine: Engine) -> None:
    engine.worker.unregister_kv_caches()


BUGS: dict[str, Bug] = {
    # vLLM calls it at its start alone.
    "bind_gpu_block_pool": Bug(SCHEDULER, ("_scheduler",), binds),
    # Of our scheduler class.
    "blocks_that_give_way": Bug(SCHEDULER, ("_scheduler",), gives_way),
    "has_pending_block_frees": Bug(SCHEDULER, ("_scheduler",), ends_block),
    "on_new_request": Bug(SCHEDULER, ("_scheduler",)),
    "get_num_new_matched_tokens": Bug(SCHEDULER, ("_scheduler",)),
    "update_state_after_alloc": Bug(SCHEDULER, ("_scheduler",)),
    "get_external_cache_hit_sources": Bug(SCHEDULER, ("_scheduler",)),
    "build_connector_meta": Bug(SCHEDULER, ("_scheduler",)),
    "update_connector_output": Bug(SCHEDULER, ("_scheduler",)),
    "request_finished": Bug(SCHEDULER, ("_scheduler",)),
    "request_finished_all_groups": Bug(SCHEDULER, ("_scheduler",)),
    "take_events": Bug(SCHEDULER, ("_scheduler",)),
    "reset_cache": Bug(SCHEDULER, ("_scheduler",), resets),
    "register_kv_caches": Bug(WORKER, ("_kv_transfer_config",), registers),
    # Since vLLM 0.33.
    "unregister_kv_caches": Bug(WORKER, ("_worker",), sleeps),
    "handle_preemptions": Bug(WORKER, ("_worker", "_weights")),
    "start_load_kv": Bug(WORKER, ("_worker", "_hearing._outcomes")),
    "wait_for_save": Bug(WORKER, ("_worker",)),
    "get_finished": Bug(WORKER, ("_hearing._outcomes",)),
    "get_block_ids_with_load_errors": Bug(WORKER, ("_hearing._outcomes",)),
    "build_connector_worker_meta": Bug(WORKER, ("_hearing._outcomes",)),
    # What is off has still to be told, so this has a guard of its own.
    "get_kv_connector_stats": Bug(SCHEDULER, ("_changes",), goes_off=False),
}
EMPTY = {"wait_for_layer_load", "save_kv_layer"}
"""They do nothing."""
ELSEWHERE = {
    "requires_kv_delivery",  # a constant
    "shutdown",  # test_a_bug_at_the_end
    "build_kv_connector_stats",  # of vLLM's front end: makes a record
    "build_prom_metrics",  # of vLLM's front end: test_a_bug_in_what_shows_metrics
    "also_tell",  # ours, of no use but to a class of ours
}


class Broken:
    """In the place of a part of ours: whatever is called of it raises, but what the hook falls back on."""

    def __init__(
        self,
        whole: Any,
        but: tuple[str, ...] = ("not_allocated", "plan_off", "give_up", "end_loads", "stale"),
    ) -> None:
        self.__dict__.update(whole=whole, but=but)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name) if name in self.but else Broken(getattr(self.whole, name), self.but)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")


def plant(engine: Engine, hook: str, patch: pytest.MonkeyPatch) -> list[int]:
    """A bug in the next call of a hook that comes to us, and in all behind it. Returns the calls that met it."""
    bug = BUGS[hook]
    connector = engine.connector if bug.side == SCHEDULER else engine.worker
    whole, met = getattr(connector, hook), []

    def broken(*given: Any, **named: Any) -> Any:
        met.append(1)
        with pytest.MonkeyPatch.context() as inside:
            for path in bug.inside:
                above, _, name = path.rpartition(".")
                owner = getattr(connector, above) if above else connector
                inside.setattr(owner, name, Broken(getattr(owner, name)))
            return whole(*given, **named)

    patch.setattr(connector, hook, broken)
    return met


def on_again(engine: Engine) -> None:
    """As after a start: a bug turns a side off for good."""
    for side in (engine.connector, engine.worker):
        side._guard.off = side._telling.off = ""
    worker = engine.worker._worker
    worker._pending.is_over = False
    if not worker._thread.is_alive():
        worker._jobs = queue.SimpleQueue()
        worker._thread = threading.Thread(target=worker._load_behind, daemon=True)
        worker._thread.start()
    engine.worker._hearing._is_blind = False
    # What nobody asked for in the meantime.
    for left in (
        engine.worker._outcomes.arrived,
        engine.worker._outcomes.failed_blocks,
        engine.worker._outcomes.report,
    ):
        left()
    # Requests whose end was not heard.
    engine.connector._scheduler.close()
    engine.connector._scheduler._requests.clear()
    engine.connector._scheduler._unheard.clear()


def test_every_hook_has_its_bug():
    own = {
        name
        for name, member in vars(WorkmemConnector).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, classmethod | property))
    }
    assert own == BUGS.keys() | EMPTY | ELSEWHERE
    for name in EMPTY:
        assert (
            getattr(WorkmemConnector, name)(None, *[None] * (1 if name == "wait_for_layer_load" else 3))
            is None
        )


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("hook", "way"),
    [(hook, "in the step") for hook in BUGS]
    + [(hook, "aside") for hook, bug in BUGS.items() if not bug.called],
)
def test_a_bug_in_it_is_contained(engine: Engine, hook: str, way: str):
    bug = BUGS[hook]
    seed = 1000 + 10 * list(BUGS).index(hook) + (way == "aside")
    ids = prompt(LENGTH, seed)
    wanted = engine.tokens(ids)
    engine.reset()
    with pytest.MonkeyPatch.context() as patch:
        if way == "aside":
            force_aside(engine, patch)
        met = plant(engine, hook, patch)
        if bug.called:
            bug.called(engine)
        (answer,) = engine.ask(ids)
        assert met, "vLLM never called it"
    assert list(answer.outputs[0].token_ids) == wanted
    connector = engine.connector if bug.side == SCHEDULER else engine.worker
    guard = connector._guard if bug.goes_off else connector._telling
    assert "ZeroDivisionError" in guard.off
    # What is vLLM's own by now is right as well.
    assert engine.tokens(ids) == wanted
    on_again(engine)


def force_aside(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Promise pages of dram as loads aside, as those of the ssd are."""
    side = engine.connector._scheduler
    match = side.match

    def aside(request: Any, computed: int) -> tuple[int, bool]:
        tokens, _ = match(request, computed)
        side._requests[request.request_id].is_async = tokens > 0
        return tokens, tokens > 0

    patch.setattr(side, "match", aside)


def test_a_bug_in_what_shows_metrics_is_contained(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    from workmem.plugins import vllm_metrics

    monkeypatch.setattr(vllm_metrics, "METRICS", None)
    kinds = {kind: kind for kind in (Gauge, Counter, Histogram)}
    shown = vllm_metrics.WorkmemMetrics(engine.core.vllm_config, kinds, [], {0: []})
    shown.observe({"pages_loaded": 1})
    assert "AttributeError" in shown._guard.off


def test_after_all_of_that_it_works_as_before(engine: Engine):
    wait_until_attached(engine)
    ids = prompt(LENGTH, 5)
    wanted = engine.tokens(ids)
    engine.reset()
    (again,) = engine.ask(ids)
    assert list(again.outputs[0].token_ids) == wanted
    assert sources(again) == {"dram": 256, "computed": 1}
    engine.host.store.audit()


def test_a_bug_at_the_end_ends_the_rest_all_the_same(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """The last test: both sides are closed then."""
    closed = []
    for side, part in ((engine.connector, "_scheduler"), (engine.worker, "_worker")):
        monkeypatch.setattr(getattr(side, part), "close", lambda: 1 / 0)
        store = side._store
        monkeypatch.setattr(store, "close", lambda store=store: closed.append(store))
        side.shutdown()
        assert "ZeroDivisionError" in side._guard.off
    assert len(closed) == 2
