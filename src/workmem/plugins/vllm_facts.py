# pyright: reportMissingImports=false
"""What is read from vLLM's configuration, see `workmem.engines.vllm.facts`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.version import __version__ as vllm_version

from workmem.engines.vllm.facts import EngineFacts
from workmem.engines.vllm.versions import minor_of, refusal


def read_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts | str:
    """The facts of an engine, or why its blocks cannot be kept."""
    why = refusal(vllm_version) or _refusal(vllm_config, kv_cache_config)
    if why:
        return why
    (group,) = kv_cache_config.kv_cache_groups
    spec, cache, model = group.kv_cache_spec, vllm_config.cache_config, vllm_config.model_config
    algorithm = cache.prefix_caching_hash_algo
    hash_block = get_hash_fn_by_name(algorithm)
    first = hash_block(resolve_none_hash_seed(hash_block))
    text = model.hf_text_config
    rope = {
        "rope_parameters": getattr(text, "rope_parameters", None),
        "sliding_window": getattr(text, "sliding_window", None),
        "overrides": str(model.hf_overrides),
    }
    return EngineFacts(
        version=minor_of(vllm_version),
        model=str(model_folder(vllm_config)),
        dtype=str(model.dtype),
        cache_dtype=str(spec.dtype),
        order=_order(kv_cache_config, spec),
        quantization=f"{model.quantization}|{cache.cache_dtype}",
        rope=json.dumps(rope, sort_keys=True, default=str),
        block_tokens=spec.block_size,
        layers=len(group.layer_names),
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        layer_bytes=spec.page_size_bytes,
        workers=vllm_config.parallel_config.tensor_parallel_size,
        hashing=f"{algorithm}:{first.hex()[:16]}:py{sys.version_info.major}.{sys.version_info.minor}",
        hash_bytes=len(first),
    )


def model_folder(vllm_config: Any) -> Path:
    """Where the weights lie: the model as a path, or its snapshot in the hub's cache."""
    model = vllm_config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for a model by name

    return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))


def _refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    groups = kv_cache_config.kv_cache_groups
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off: start vLLM without --no-enable-prefix-caching"
    if len(groups) != 1:
        return f"this model keeps KV in {len(groups)} groups (sliding windows or states), which is not supported yet"
    spec = groups[0].kv_cache_spec
    # Not what is derived from them: in the tables of others some blocks are null, or are filled in another order.
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return (
            f"this model keeps KV as {type(spec).__name__}, and only full attention and MLA are supported yet"
        )
    if kv_cache_config.hash_block_size not in (None, spec.block_size):
        return "blocks are hashed in parts"
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported yet"
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        return "context parallelism is not supported yet: a block is then shared out among workers"
    return ""


def _order(kv_cache_config: Any, spec: Any) -> str:
    order = f"{type(spec).__name__}/{kv_cache_config.kv_cache_layout}/{current_platform.device_type}"
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - CPU builds alone

        order += f"/{_get_attn_isa(spec.dtype, spec.block_size, spec.head_size)}"
    return order
