"""Shapes of common models by name, for whoever has no folder of theirs yet."""

from __future__ import annotations

import re

from workmem.engines.kv_size import KVShape

_PLAIN: dict[str, tuple[int, int, int]] = {
    # name: layers, KV heads, head dimension
    "Llama-3.2-1B": (16, 8, 64),
    "Llama-3.2-3B": (28, 8, 128),
    "Llama-3-8B": (32, 8, 128),
    "Llama-3-70B": (80, 8, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "Llama-3.1-70B": (80, 8, 128),
    "Llama-3.3-70B": (80, 8, 128),
    "Llama-3.1-405B": (126, 8, 128),
    "Mistral-7B": (32, 8, 128),
    "Mistral-Nemo": (40, 8, 128),
    "Mistral-Small-24B": (40, 8, 128),
    "Mixtral-8x7B": (32, 8, 128),
    "Phi-4": (40, 10, 128),
    "Qwen2.5-0.5B": (24, 2, 64),
    "Qwen2.5-1.5B": (28, 2, 128),
    "Qwen2.5-3B": (36, 2, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen2.5-14B": (48, 8, 128),
    "Qwen2.5-32B": (64, 8, 128),
    "Qwen2.5-72B": (80, 8, 128),
    "Qwen3-0.6B": (28, 8, 128),
    "Qwen3-1.7B": (28, 8, 128),
    "Qwen3-4B": (36, 8, 128),
    "Qwen3-8B": (36, 8, 128),
    "Qwen3-14B": (40, 8, 128),
    "Qwen3-32B": (64, 8, 128),
    "Qwen3-30B-A3B": (48, 4, 128),
    "Qwen3-235B-A22B": (94, 4, 128),
    "Qwen3-Coder-480B-A35B": (62, 8, 128),
    "SmolLM2-135M": (30, 3, 64),
    "SmolLM2-360M": (32, 5, 64),
    "SmolLM2-1.7B": (24, 32, 64),
}
_LATENT: dict[str, tuple[int, int]] = {
    # name: layers, numbers of the latent vector and the rotated key
    "DeepSeek-V2-Lite": (27, 512 + 64),
    "DeepSeek-V3": (61, 512 + 64),
    "DeepSeek-V3.1": (61, 512 + 64),
    "DeepSeek-R1": (61, 512 + 64),
    "Kimi-K2": (61, 512 + 64),
}
_WINDOWED: dict[str, tuple[int, int, int, int, int]] = {
    # name: layers, KV heads, head dimension, layers with a window, its tokens
    "gpt-oss-20b": (24, 8, 64, 12, 128),
    "gpt-oss-120b": (36, 8, 64, 18, 128),
}
_VARIANT = re.compile(
    r"-(?:instruct|it|chat|base|hf|thinking|fp8|awq|gptq|int4|int8|bf16|v\d+(?:\.\d+)?|\d{4}|coder)(?=-|$)"
)

SHAPES: dict[str, KVShape] = {
    shape.name: shape
    for shape in (
        *(KVShape(name=n, layers=a, kv_heads=b, head_dim=c) for n, (a, b, c) in _PLAIN.items()),
        *(KVShape(name=n, layers=a, kv_heads=1, head_dim=b, is_latent=True) for n, (a, b) in _LATENT.items()),
        *(
            KVShape(name=n, layers=a, kv_heads=b, head_dim=c, window_layers=d, window=e)
            for n, (a, b, c, d, e) in _WINDOWED.items()
        ),
    )
}


def known_shape(name: str) -> KVShape | None:
    """The shape of a model by its name, with or without who published it and which variant it is."""
    wanted = _plain(name)
    return next((shape for shape in SHAPES.values() if _plain(shape.name) == wanted), None)


def _plain(name: str) -> str:
    """`meta-llama/Llama-3.1-8B-Instruct` is `llama-3.1-8b`."""
    return _VARIANT.sub("", name.rsplit("/", 1)[-1].lower().removeprefix("meta-"))
