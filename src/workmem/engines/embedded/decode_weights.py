"""What `decode_step.c` needs of a loaded model, and which models it can compute.

The C code repeats the arithmetic of one structure: the dense decoder of Llama and its kin. Whether a model has
exactly that structure is decided here and nowhere else, module by module and by exact type, so that whatever was
added or replaced (a hook, an adapter, quantised weights, a child that a new version of transformers brings) sends
the model down the ordinary path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)
from transformers.activations import SiLUActivation

from workmem.core.layout import KVLayout
from workmem.engines.embedded.fuse import FusedRMSNorm
from workmem.engines.embedded.small_rows import SmallRowsHead, SmallRowsLinear

MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, SmolLM3ForCausalLM)
ROTARIES = ("LlamaRotaryEmbedding", "MistralRotaryEmbedding", "Qwen2RotaryEmbedding", "Qwen3RotaryEmbedding",
            "SmolLM3RotaryEmbedding")  # fmt: skip
_POINTER, _I64, _F64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Unsupported(Exception):
    """The model is not what the native decode step computes; the message says in what. Never leaves this module."""


class CProduct(ctypes.Structure):
    """`product` of the source."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER))


class CLayer(ctypes.Structure):
    """`layer` of the source."""

    _fields_ = (
        *((name, CProduct) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, _POINTER) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("rotates", _I64),
    )


class CModel(ctypes.Structure):
    """`model` of the source."""

    _fields_ = (
        *((name, _I64) for name in ("layers", "hidden", "inner", "vocabulary", "heads", "kv_heads", "dim")),
        *(
            (name, _I64)
            for name in ("is_bf16", "embedding_is_bf16", "kv_is_bf16", "block_tokens", "layer_bytes")
        ),
        ("epsilon", _F64),
        ("scale", _F64),
        ("embedding", _POINTER),
        ("layer", ctypes.POINTER(CLayer)),
        ("norm", _POINTER),
        ("head", CProduct),
    )


class DecodeWeights:
    """Addresses of a model's weights, and the tensors that keep them good."""

    def __init__(self, model: Any, layout: KVLayout) -> None:
        """Raises Unsupported."""
        self._held: list[torch.Tensor] = []
        self._stored: set[torch.dtype] = set()
        self._epsilons: set[float] = set()
        config = model.config
        _require(type(model) in MODELS, f"{type(model).__name__} is not known")
        _children(model, ("model", "lm_head"))
        body = model.model
        _children(body, ("embed_tokens", "layers", "norm", "rotary_emb"))
        _require(type(body.rotary_emb).__name__ in ROTARIES, "the rotary embedding is not known")
        _unhooked(body.rotary_emb)
        _require(len(body.layers) == layout.layers, "not every layer has KV")
        hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
        heads, kv_heads, dim = config.num_attention_heads, layout.kv_heads, layout.head_dim
        self.sizes = (heads, kv_heads, dim, hidden, inner, vocabulary)
        self.rotary: nn.Module = body.rotary_emb
        scales = {float(layer.self_attn.scaling) for layer in body.layers}
        _require(len(scales) == 1, "layers scale their scores differently")
        self._layers = (CLayer * layout.layers)(*(self._layer(layer) for layer in body.layers))
        embedding = body.embed_tokens
        _plain(embedding, (nn.Embedding,))
        _require(embedding.max_norm is None, "the embedding is normed")
        self.c = CModel(
            layers=layout.layers, hidden=hidden, inner=inner, vocabulary=vocabulary, heads=heads, kv_heads=kv_heads,
            dim=dim, kv_is_bf16=layout.dtype == "bf16", block_tokens=layout.block_tokens,
            layer_bytes=layout.layer_bytes, scale=scales.pop(),
            embedding=self._address(embedding.weight, (vocabulary, hidden)),
            embedding_is_bf16=embedding.weight.dtype == torch.bfloat16,
            layer=self._layers, norm=self._norm(body.norm, hidden), head=self._product(model.lm_head, hidden, vocabulary),
        )  # fmt: skip
        _require(len(self._stored) == 1, "linear layers are stored in several ways")
        _require(len(self._epsilons) == 1, "norms have several epsilons")
        self.c.is_bf16 = self._stored == {torch.bfloat16}
        self.c.epsilon = self._epsilons.pop()

    def _layer(self, layer: Any) -> CLayer:
        heads, kv_heads, dim, hidden, inner, _ = self.sizes
        _children(layer, ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
        attention, mlp = layer.self_attn, layer.mlp
        normed = hasattr(attention, "q_norm")
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        _children(attention, (*names, "q_norm", "k_norm") if normed else names)
        _children(mlp, ("gate_proj", "up_proj", "down_proj", "act_fn"))
        _require(type(mlp.act_fn) in (nn.SiLU, SiLUActivation), "the activation is not SiLU")
        _unhooked(mlp.act_fn)
        _require(getattr(attention, "sliding_window", None) is None, "a layer attends through a window")
        return CLayer(
            q=self._product(attention.q_proj, hidden, heads * dim),
            k=self._product(attention.k_proj, hidden, kv_heads * dim),
            v=self._product(attention.v_proj, hidden, kv_heads * dim),
            o=self._product(attention.o_proj, heads * dim, hidden),
            gate=self._product(mlp.gate_proj, hidden, inner),
            up=self._product(mlp.up_proj, hidden, inner),
            down=self._product(mlp.down_proj, inner, hidden),
            input_norm=self._norm(layer.input_layernorm, hidden),
            post_norm=self._norm(layer.post_attention_layernorm, hidden),
            q_norm=self._norm(attention.q_norm, dim) if normed else None,
            k_norm=self._norm(attention.k_norm, dim) if normed else None,
            # Set on models of which some layers know no positions.
            rotates=bool(getattr(attention, "use_rope", True)),
        )

    def _product(self, linear: Any, width: int, count: int) -> CProduct:
        _plain(linear, (nn.Linear, SmallRowsLinear, SmallRowsHead))
        weight = linear.weight if type(linear) is nn.Linear else linear.twin
        _require(weight.dtype in (torch.float32, torch.bfloat16), f"weights are {weight.dtype}")
        self._stored.add(weight.dtype)
        bias = None if linear.bias is None else self._address(linear.bias.detach().float(), (count,))
        return CProduct(self._address(weight, (count, width)), bias)

    def _norm(self, norm: Any, width: int) -> int:
        _plain(norm, (FusedRMSNorm,))
        self._epsilons.add(float(norm.variance_epsilon))
        return self._address(norm.weight.detach().float(), (width,))

    def _address(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> int:
        _require(
            tensor.device.type == "cpu" and tensor.layout == torch.strided, f"weights are on {tensor.device}"
        )
        _require(tuple(tensor.shape) == shape, f"a weight has shape {tuple(tensor.shape)}, not {shape}")
        _require(tensor.is_contiguous(), "a weight is not contiguous")
        # Not the parameter: whoever gives that other data must not pull these bytes away.
        self._held.append(held := tensor.detach())
        return held.data_ptr()


def collect(model: Any, layout: KVLayout) -> tuple[DecodeWeights | None, str]:
    """The weights of `model`; or None and why it is not computed natively."""
    try:
        return DecodeWeights(model, layout), ""
    except (Unsupported, AttributeError) as reason:
        # An attribute that is not there is as good a sign of another structure as one that differs.
        return None, str(reason)


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise Unsupported(otherwise)


def _children(module: nn.Module, names: Iterable[str]) -> None:
    found = {name for name, _ in module.named_children()}
    _require(found == set(names), f"{type(module).__name__} consists of {', '.join(sorted(found))}")
    _unhooked(module)


def _plain(module: nn.Module, kinds: tuple[type, ...]) -> None:
    _require(type(module) in kinds, f"{type(module).__name__} is not known")
    _unhooked(module)


def _unhooked(module: Any) -> None:
    # What replaces `forward` on the instance (as offloading does) or hooks into it would not be heard.
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)  # noqa: SLF001
    _require(not hooked, f"{type(module).__name__} is hooked")
