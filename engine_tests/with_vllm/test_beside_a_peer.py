"""In a `MultiConnector`, beside vLLM's own offload: whoever has more of a prompt loads it, both save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Engine, Host, prompt, series, sources


@pytest.fixture(scope="module")
def engine(host: Host, smollm2: Path) -> Iterator[Engine]:
    ours = {
        "kv_connector": "WorkmemConnector",
        "kv_connector_module_path": "workmem.plugins.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store.host.socket": str(host.socket), "vllm.start_store": "false"},
    }
    peer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 64 * 2**20,
            "spec_name": "WorkmemCpuSpec",
            "spec_module_path": "workmem.plugins.vllm_offload",
        },
    }
    made = Engine(
        host,
        smollm2,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [ours, peer]},
        },
    )
    yield made
    made.llm.llm_engine.engine_core.shutdown()


def children(engine: Engine) -> list:
    return engine.core.scheduler.connector._connectors


def test_ours_loads_what_it_has(engine: Engine):
    ids = prompt(130, 1)
    engine.ask(ids)
    wanted = engine.tokens(ids)
    engine.host.settle()
    assert engine.llm.reset_prefix_cache()
    (again,) = engine.ask(ids)
    assert list(again.outputs[0].token_ids) == wanted
    assert sources(again) == {"dram": 128, "computed": 2}
    assert not children(engine)[0]._guard.off


def test_the_peer_loads_where_ours_is_gone(engine: Engine):
    ids = prompt(130, 2)
    engine.ask(ids)
    wanted = engine.tokens(ids)
    engine.host.settle()
    engine.host.stop()
    assert engine.llm.reset_prefix_cache()
    (again,) = engine.ask(ids)
    assert list(again.outputs[0].token_ids) == wanted
    assert again.num_cached_tokens == 128
    engine.host.start()


def test_no_request_is_kept_in_mind(engine: Engine):
    assert not children(engine)[0]._scheduler._requests


def test_vllm_shows_our_metrics_beside_the_peers(engine: Engine):
    shown = {metric.name for metric in engine.llm.get_metrics()}
    assert {"vllm:workmem_pages_loaded", "vllm:kv_offload_load_bytes"} <= shown
    assert series(engine, "pages_loaded") == {"": 4}
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    log = KVConnectorLogging(engine.llm.llm_engine.vllm_config.kv_transfer_config)
    log.observe({"WorkmemConnector": {"pages_loaded": 2, "pins": 0}})
    lines: list[str] = []
    log.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: WorkmemConnector={'pages_loaded': 2}"]
