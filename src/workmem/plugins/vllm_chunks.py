# pyright: reportMissingImports=false
"""What is known of the chunks of vLLM's tiered offload."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from workmem.config import cache_dir
from workmem.engines.vllm.chain import Chain
from workmem.engines.vllm.chunk_layout import chunk_layout
from workmem.plugins.vllm_facts import fingerprint, read_facts

if TYPE_CHECKING:
    from workmem.core.layout import KVLayout


def chain_of(req_context: Any) -> Chain:
    """The chunks of a request.

    VLLM keeps where each ends, and hands out one at a time: it takes all of them to ask for them in one round trip,
    and to let none leave before those behind it.
    """
    chain = req_context.get_state(Chain)
    if chain is None:
        chain = Chain(getattr(req_context, "_offload_key_positions", {}))
        req_context.set_state(chain)
    return chain


def find_layout(spec: Any) -> tuple[KVLayout, str] | str:
    """What lies in a row, and the digest of the weights; or why its chunks cannot be kept."""
    configs = _find_configs(spec.config.extra_config)
    if configs is None:
        return "vLLM's configuration was not found where this version of it keeps it"
    vllm_config, kv_cache_config = configs
    facts = read_facts(vllm_config, kv_cache_config)
    if isinstance(facts, str):
        return facts
    why = facts.refusal()
    if why:
        return why
    if vllm_config.lora_config is not None:
        return (
            "vLLM's tiered offload does not say which adapter a chunk is of: use workmem's connector for LoRA"
        )
    if not isinstance(kv_cache_config.kv_cache_groups[0].kv_cache_spec, FullAttentionSpec):
        return "only full attention is supported: with windows a chunk may be filled in part"
    copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    order = f"{spec.config.kv_cache_layout}{'/canonical' if spec.config.canonical_layout else ''}"
    layout = chunk_layout(facts, blocks=spec.blocks_per_chunk, copies=copies, order=order)
    row_bytes = spec.cpu_page_size_per_worker * copies
    if layout.page_bytes != row_bytes:
        return f"a chunk has {row_bytes} bytes, where this model's KV makes {layout.page_bytes}"
    return layout, fingerprint(vllm_config, cache_dir())


def _find_configs(extra: Any) -> tuple[Any, Any] | None:
    """VLLM's configurations, from the caller that makes the tier.

    It hands a tier too little of them to tell weights, quantization and hashing apart, and a chunk of other weights
    must never be a hit (R9).
    """
    frame = inspect.currentframe()
    while frame is not None:
        here = frame.f_locals
        transfer = getattr(here.get("vllm_config"), "kv_transfer_config", None)
        if "kv_cache_config" in here and getattr(transfer, "kv_connector_extra_config", None) is extra:
            return here["vllm_config"], here["kv_cache_config"]
        frame = frame.f_back
    return None
