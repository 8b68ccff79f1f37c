"""How many bytes of KV a model makes of a token, and what a tier of a given size holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from workmem.core.errors import ConfigError

KV_BYTES: dict[str, float] = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}
"""Bytes of one number of KV, by the name of its type."""
_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"}
_STATE_FIELDS = ("linear_num_value_heads", "mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size")
"""Fields of configurations of models that keep a state beside, or in place of, keys and values."""


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a model keeps of each token."""

    name: str
    layers: int
    """Layers that keep KV."""
    kv_heads: int
    """1 where keys and values are one latent vector (MLA)."""
    head_dim: int
    """Numbers of one key, or of the latent vector."""
    is_latent: bool = False
    """One vector a layer in place of a key and a value; each tensor-parallel worker has all of it."""
    window_layers: int = 0
    """Of `layers`, those that look no further back than `window` tokens."""
    window: int = 0
    dtype: str = "bf16"
    """What the model computes in, and keeps KV in unless told otherwise."""

    @property
    def refusal(self) -> str:
        """Why the connector does not keep this model's KV yet; empty where it does."""
        if self.window_layers:
            return "layers with a sliding window, which vLLM keeps in a group of its own: not supported yet"
        return ""

    def numbers(self, workers: int = 1) -> int:
        """Numbers of KV a token, over all layers and tensor-parallel workers."""
        if self.is_latent:
            return self.layers * self.head_dim * workers
        # With more workers than heads, heads are held more than once.
        return 2 * self.layers * max(self.kv_heads, workers) * self.head_dim

    def token_bytes(self, dtype: str = "", workers: int = 1) -> int:
        """Bytes of KV a token, over all layers and workers. `dtype`: that of the model where empty."""
        return int(self.numbers(workers) * KV_BYTES[dtype or self.dtype])


class Fill(msgspec.Struct, frozen=True):
    """What a tier holds."""

    bytes: int
    tokens: int
    contexts: int
    """Whole contexts of the length asked for."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: of a model, kept in one type, by so many workers."""

    model: str
    dtype: str
    workers: int
    block_tokens: int
    token_bytes: int
    block_bytes: int
    context: int
    context_bytes: int
    tiers: dict[str, Fill]
    advice: dict[str, int]
    """Setting to bytes: dram for the contexts at work, ssd for all that may come back."""
    note: str


def size_of(
    shape: KVShape,
    *,
    dtype: str,
    workers: int,
    block_tokens: int,
    context: int,
    agents: int,
    sessions: int,
    tiers: Mapping[str, int],
) -> Size:
    """What `tiers` (name to bytes) hold, and what `agents` at work and `sessions` that may come back need.

    Nothing is counted as shared: a common system prompt is kept once, so fleets need less. Pages are whole blocks.
    """
    token = shape.token_bytes(dtype, workers)
    block = token * block_tokens
    blocks_each = -(-context // block_tokens)
    each = blocks_each * block
    fills = {name: Fill(count, count // block * block_tokens, count // each) for name, count in tiers.items()}
    return Size(
        model=shape.name,
        dtype=dtype or shape.dtype,
        workers=workers,
        block_tokens=block_tokens,
        token_bytes=token,
        block_bytes=block,
        context=context,
        context_bytes=each,
        tiers=fills,
        advice={"store.dram.bytes": agents * each, "store.ssd.bytes": max(sessions, agents) * each},
        note=shape.refusal,
    )


def shape_from(name: str, config: Mapping[str, Any]) -> KVShape:
    """The shape that a model's `config.json` describes. Raises ConfigError where it does not say enough."""
    text = cast("Mapping[str, Any]", config.get("text_config") or config)
    layers = _count(name, text, "num_hidden_layers", "n_layer")
    found = [field for field in _STATE_FIELDS if text.get(field)]
    if found:
        raise ConfigError(f"{name}: a model with a state per sequence ({found[0]}), which is not kept yet")
    dtype = _dtype(text, config)
    if rank := text.get("kv_lora_rank"):
        rope = int(text.get("qk_rope_head_dim") or 0)
        return KVShape(
            name=name, layers=layers, kv_heads=1, head_dim=int(rank) + rope, is_latent=True, dtype=dtype
        )
    heads = _count(name, text, "num_attention_heads", "n_head")
    head_dim = text.get("head_dim") or _count(name, text, "hidden_size", "n_embd") // heads
    windows, window = _windows(text, layers)
    return KVShape(
        name=name,
        layers=layers,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        window_layers=windows,
        window=window,
        dtype=dtype,
    )


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Layers with a sliding window, and its tokens."""
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return 0, 0
    kinds = text.get("layer_types")
    return (sum("sliding" in kind for kind in kinds) if kinds else layers), int(window)


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    for place in (text, config):
        for field in ("dtype", "torch_dtype"):
            said = str(place.get(field) or "").removeprefix("torch.")
            if said:
                return _NAMES.get(said, "bf16")
    return "bf16"


def _count(name: str, text: Mapping[str, Any], *fields: str) -> int:
    for field in fields:
        if text.get(field):
            return int(text[field])
    raise ConfigError(f"{name}: its config.json has no {fields[0]}")
