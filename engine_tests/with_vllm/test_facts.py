"""Models whose KV is kept in a way of their own are refused in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from workmem.engines.vllm.refusals import ONE_ONLY, refusal
from workmem.plugins.vllm_facts import fingerprint

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def of(*specs: object) -> str:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return refusal(config, SimpleNamespace(kv_cache_groups=groups, hash_block_size=None))


@pytest.mark.parametrize("kind", [FullAttentionSpec, MLAAttentionSpec])
def test_full_attention_is_taken(kind):
    assert of(kind(**SHAPE)) == ""


@pytest.mark.parametrize(
    "spec", [SlidingWindowSpec(**SHAPE, sliding_window=128), SinkFullAttentionSpec(**SHAPE, sink_len=16)]
)
def test_other_kinds_are_refused(spec):
    assert type(spec).__name__ in of(spec)


def test_several_groups_are_refused():
    one = FullAttentionSpec(**SHAPE)
    assert "2 groups (FullAttentionSpec, FullAttentionSpec)" in of(one, one)


def test_what_is_read_of_parallelism_is_there():
    assert {field: getattr(ParallelConfig(), field) for field in ONE_ONLY} == dict.fromkeys(ONE_ONLY, 1)


def test_weights_that_lie_in_no_file_are_of_one_process(smollm2, tmp_path):
    """Whoever trains starts with made-up ones and gives it others: the next start has others again."""

    def told(load_format: str) -> str:
        load = SimpleNamespace(load_format=load_format, download_dir=None)
        model = SimpleNamespace(model=str(smollm2), revision=None)
        return fingerprint(SimpleNamespace(load_config=load, model_config=model), tmp_path)

    assert told("auto") == told("safetensors")
    assert len({told("auto"), told("dummy"), told("dummy")}) == 3
