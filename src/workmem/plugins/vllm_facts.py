# pyright: reportMissingImports=false
"""What is read from vLLM's configuration, see `workmem.engines.vllm.facts`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.version import __version__ as vllm_version

from workmem.engines.fingerprint import identify
from workmem.engines.vllm import refusals
from workmem.engines.vllm.facts import EngineFacts
from workmem.engines.vllm.versions import minor_of, refusal


def read_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts | str:
    """The facts of an engine, or why its blocks cannot be kept."""
    why = refusal(vllm_version) or refusals.refusal(vllm_config, kv_cache_config)
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
        "overrides": f"{model.hf_overrides}|{model.hf_config_path or ''}",
    }
    quantization = (str(model.quantization), str(cache.cache_dtype), refusals.weights_beside(vllm_config))
    return EngineFacts(
        version=minor_of(vllm_version),
        model=str(model_folder(vllm_config)),
        dtype=str(model.dtype),
        cache_dtype=str(spec.dtype),
        order=_order(kv_cache_config, spec),
        quantization="|".join(filter(None, quantization)),
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


def fingerprint(vllm_config: Any, cache_folder: Path) -> str:
    """Digest of the weights. Raises OSError where there are none that are known."""
    if vllm_config.load_config.load_format == "dummy":
        # By chance, or to be given by whoever trains: of this process alone, also where files lie there.
        return f"dummy-{os.urandom(16).hex()}"
    return identify(model_folder(vllm_config), cache_folder=cache_folder)


def model_folder(vllm_config: Any) -> Path:
    """Where the weights lie: the model as a path, or its snapshot in the hub's cache."""
    model = vllm_config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for a model by name

    return Path(
        snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=vllm_config.load_config.download_dir,
            local_files_only=True,
        )
    )


def _order(kv_cache_config: Any, spec: Any) -> str:
    order = f"{type(spec).__name__}/{kv_cache_config.kv_cache_layout}/{current_platform.device_type}"
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - CPU builds alone

        order += f"/{_get_attn_isa(spec.dtype, spec.block_size, spec.head_size)}"
    return order
