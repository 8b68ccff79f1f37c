"""Configurations of vLLM whose blocks cannot be kept: told at load, by field and value, and with what to do."""

from __future__ import annotations

from typing import Any

ONE_ONLY = {
    "pipeline_parallel_size": "each stage has other layers of a block; use --tensor-parallel-size instead",
    "decode_context_parallel_size": "a block is then shared out among workers; leave it at 1",
    "prefill_context_parallel_size": "a block is then shared out among workers; leave it at 1",
    "nnodes_within_dp": "all workers of an engine use the store of one host; give each host an engine of its own",
}
"""Of vLLM's `ParallelConfig`: what is more than one is refused, and why."""
_TAKEN = ("FullAttentionSpec", "MLAAttentionSpec")
"""Not what is derived from them: in the tables of others some blocks are null, or are filled in another order."""

_PLAIN_FORMS = ("auto", "hf", "safetensors", "fastsafetensors")


def refusal(config: Any, kv_cache: Any) -> str:
    """Why blocks of an engine with vLLM's `VllmConfig` and `KVCacheConfig` cannot be kept; empty when they can."""
    if not config.cache_config.enable_prefix_caching:
        return (
            "cache_config.enable_prefix_caching is False, and blocks are named by the prefix cache's hashes: "
            "start vLLM without --no-enable-prefix-caching"
        )
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    if len(specs) != 1:
        kinds = ", ".join(type(spec).__name__ for spec in specs) or "none"
        return (
            f"this model keeps KV in {len(specs)} groups ({kinds}), and one is supported; where it has sliding "
            "windows beside full attention, --disable-hybrid-kv-cache-manager keeps all of it in one"
        )
    kind = type(specs[0]).__name__
    if kind not in _TAKEN:
        return f"this model keeps KV as {kind}, and {' and '.join(_TAKEN)} are supported: serve it without workmem"
    if kv_cache.hash_block_size not in (None, specs[0].block_size):
        return (
            f"kv_cache_config.hash_block_size is {kv_cache.hash_block_size} and a block has {specs[0].block_size} "
            f"tokens, so parts of blocks are hashed: start vLLM with --block-size {kv_cache.hash_block_size}"
        )
    for field, why in ONE_ONLY.items():
        value = getattr(config.parallel_config, field)
        if value > 1:
            return f"parallel_config.{field} is {value}: {why}"
    return ""


def weights_beside(config: Any) -> str:
    """What of the weights the model's folder does not tell; empty where it tells all.

    Files of another form, and the layers that a drafting model has in each block: pages with them are others.
    """
    found: list[str] = []
    form = config.load_config.load_format
    if form not in _PLAIN_FORMS:
        # Of several files in the folder it may read others.
        found.append(form)
    drafting = config.speculative_config
    if drafting is not None and drafting.uses_draft_kv_cache():
        drafter = drafting.draft_model_config
        found.append(f"{drafting.method}:{drafter.model}@{drafter.revision}")
    return "/".join(found)
