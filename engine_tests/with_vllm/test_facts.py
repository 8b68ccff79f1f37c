"""Models whose KV is kept in a way of their own are refused in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from workmem.plugins import vllm_facts

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def refusal(*specs: object, **parallel: int) -> str:
    one = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(**one | parallel),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return vllm_facts._refusal(config, SimpleNamespace(kv_cache_groups=groups, hash_block_size=None))


@pytest.mark.parametrize("kind", [FullAttentionSpec, MLAAttentionSpec])
def test_full_attention_is_taken(kind):
    assert refusal(kind(**SHAPE)) == ""


@pytest.mark.parametrize(
    "spec", [SlidingWindowSpec(**SHAPE, sliding_window=128), SinkFullAttentionSpec(**SHAPE, sink_len=16)]
)
def test_other_kinds_are_refused(spec):
    assert type(spec).__name__ in refusal(spec)


def test_several_groups_and_parts_of_blocks_are_refused():
    one = FullAttentionSpec(**SHAPE)
    assert "2 groups" in refusal(one, one)
    assert "context parallelism" in refusal(one, decode_context_parallel_size=2)
    assert "pipeline" in refusal(one, pipeline_parallel_size=2)
