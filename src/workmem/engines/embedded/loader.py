"""From a folder of weights to a model ready to compute, with the layout of its KV.

Refuses at start-up what could not be served correctly later, rather than guess.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from workmem.core.errors import ConfigError
from workmem.core.layout import DType, KVLayout
from workmem.engines import fingerprint
from workmem.engines.embedded import fuse, small_rows

SUPPORTED: dict[str, str] = {
    "llama": "Llama 2 and 3, SmolLM, TinyLlama",
    "mistral": "Mistral",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
}
"""`model_type` -> what it covers. Dense decoders whose only state per token is rotated keys and values."""

# Rotary schemes whose angles depend on the position alone. "dynamic" and "longrope" rotate a key according
# to the length of the whole request, so that one prefix has many keys and none can be shared.
STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})

Arithmetic = Literal["fast", "fixed"]
"""fast: kernels chosen by measured speed. fixed: the model's own modules, for bit-identical results."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode, on its device. Lives as long as the engine; nothing to free by hand."""

    model: PreTrainedModel
    config: PreTrainedConfig
    layout: KVLayout
    fingerprint: str
    """Digest of the weights, see `fingerprint.identify`."""
    max_context: int
    """Tokens of prompt and output together."""
    vocabulary: int
    """Width of a row of logits; may exceed the tokenizer's."""
    device: torch.device
    compute_dtype: torch.dtype
    """Of activations. fp32 on a CPU without bf16 arithmetic even where the values are bf16."""
    notes: tuple[str, ...] = ()
    """Sentences for the start-up log: limits set and kernels chosen."""


def load(
    folder: Path,
    *,
    device: str,
    dtype: DType,
    attn_implementation: str,
    arithmetic: Arithmetic = "fast",
    cache_folder: Path | None = None,
) -> LoadedModel:
    """Load `folder` (safetensors, or the path of one GGUF file) without touching the network.

    `device` is "cpu", "cuda", "cuda:N" or "auto". `attn_implementation` names a function registered
    with transformers. `cache_folder` remembers file digests between starts. Raises ConfigError.
    """
    source = _source(folder)
    config = _config(folder, source)
    notes: list[str] = []
    max_context = _check(folder, config, notes)
    place = _device(device)
    try:
        weights = fingerprint.identify(folder, cache_folder=cache_folder)
    except OSError as error:
        raise _broken(folder, error) from error
    model = _weights(folder, source, config, dtype, attn_implementation)
    compute_dtype = _compute_dtype(place, dtype)
    # Only ever widened: rounding to bf16 would reach the frequencies of positions, which are no weights.
    nn.Module.to(model, device=place, dtype=torch.float32 if compute_dtype == torch.float32 else None)
    model.eval().requires_grad_(requires_grad=False)
    if arithmetic == "fast":
        notes += fuse.fuse(model)
        if place.type == "cpu" and dtype == "bf16" and compute_dtype == torch.float32:
            notes += small_rows.attach(model)
    return LoadedModel(
        model=model,
        config=config,
        layout=kv_layout(config, dtype),
        fingerprint=weights,
        max_context=max_context,
        vocabulary=int(config.vocab_size),
        device=place,
        compute_dtype=compute_dtype,
        notes=tuple(notes),
    )


def kv_layout(config: PreTrainedConfig, dtype: DType) -> KVLayout:
    """The layout of the KV that a model of this configuration computes."""
    heads: int = config.num_attention_heads
    rope: dict[str, Any] = dict(config.rope_parameters)
    for name in ("no_rope_layers", "partial_rotary_factor"):
        value = getattr(config, name, None)
        if value is not None:
            rope[name] = value
    if rope["rope_type"] == "yarn":
        # Yarn derives its factor from this bound where the parameters do not name the original one.
        rope["max_position_embeddings"] = config.max_position_embeddings
    return KVLayout(
        dtype=dtype,
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rope=json.dumps(rope, sort_keys=True, separators=(",", ":")),
    )


def has_bf16_arithmetic(device: torch.device) -> bool:
    """Whether `device` multiplies bf16 in hardware; elsewhere it is emulated and slower than fp32."""
    if device.type != "cpu":
        return True
    # Private names of torch: absent ones mean "no", which costs speed, not correctness.
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool((probe is not None and probe()) or (amx is not None and amx()))


def _compute_dtype(device: torch.device, dtype: DType) -> torch.dtype:
    return torch.bfloat16 if dtype == "bf16" and has_bf16_arithmetic(device) else torch.float32


def _source(folder: Path) -> dict[str, Any]:
    """Arguments that point transformers at `folder`; checks that it can hold a model at all."""
    if folder.is_file() and folder.suffix == ".gguf":
        return {"pretrained_model_name_or_path": folder.parent, "gguf_file": folder.name}
    if not folder.is_dir():
        raise ConfigError(f"$.engine.model: {folder} is neither a folder nor a GGUF file")
    try:
        has_config = (folder / "config.json").is_file()
        files = [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")]
        unreadable = [str(path) for path in files if not os.access(path, os.R_OK)]
    except PermissionError:
        has_config, unreadable = False, [str(folder)]
    if unreadable:
        raise ConfigError(f"$.engine.model: {unreadable[0]} may not be read by this user; chmod or chown it")
    if not has_config:
        raise ConfigError(
            f"$.engine.model: {folder} has no config.json; point it at a Hugging Face model folder"
        )
    if not fingerprint.weight_files(folder):
        raise ConfigError(
            f"$.engine.model: {folder} has no *.safetensors; convert the weights "
            "(pickled *.bin files can run code and are not read)"
        )
    return {"pretrained_model_name_or_path": folder}


def _config(folder: Path, source: dict[str, Any]) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(**source, local_files_only=True)
    except KeyError as error:
        raise _unsupported(folder, str(error)) from error
    except (OSError, ValueError, TypeError) as error:
        raise _broken(folder, error) from error


def _check(folder: Path, config: PreTrainedConfig, notes: list[str]) -> int:
    """Refuse what cannot be paged; return the longest context in tokens."""
    if config.model_type not in SUPPORTED:
        raise _unsupported(folder, config.model_type)
    if config.is_encoder_decoder:
        raise ConfigError(f"$.engine.model: {folder} is an encoder-decoder; only decoders can be served")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"$.engine.model: {folder} holds quantized weights; use the bf16 or fp32 original, or a GGUF"
        )
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in STATIC_ROPES:
        raise ConfigError(
            f"$.engine.model: {folder} uses rope type {rope_type!r}, whose keys depend on the length of the "
            f"request, so no prefix can be shared; supported: {', '.join(sorted(STATIC_ROPES))}"
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if others:
        raise ConfigError(
            f"$.engine.model: {folder} has layers of type {', '.join(others)}; only full_attention can be paged"
        )
    max_context = int(config.max_position_embeddings)
    window: int | None = getattr(config, "sliding_window", None)
    if window is not None:
        if window < max_context:
            notes.append(
                f"The context is limited to {window} tokens, the model's attention window "
                f"(it was trained for {max_context})."
            )
            max_context = window
        # Within the window, attention is plain causal attention: say so to the model's own mask code.
        config.sliding_window = None
    return max_context


def _weights(
    folder: Path, source: dict[str, Any], config: PreTrainedConfig, dtype: DType, attn_implementation: str
) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            **_unpacked(source),
            config=config,
            dtype=torch.bfloat16 if dtype == "bf16" else torch.float32,
            attn_implementation=attn_implementation,
            local_files_only=True,
            output_loading_info=True,
        )
    except SafetensorError as error:
        files = fingerprint.weight_files(folder)
        which = str(files[0]) if len(files) == 1 else f"one of {len(files)} files of weights in {folder}"
        raise ConfigError(
            f"$.engine.model: {which} is cut short or damaged ({error}); copy or download it again"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise _broken(folder, error) from error
    # transformers fills what a checkpoint lacks with random numbers and goes on.
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"$.engine.model: {folder} lacks {len(missing)} weights, first {missing[0]}; download it again"
        )
    return model


def _unpacked(source: dict[str, Any]) -> dict[str, Any]:
    """Arguments that turn GGUF blocks into plain weights; older versions of transformers do so unasked."""
    gguf_config = getattr(transformers, "GgufConfig", None)
    if "gguf_file" not in source or gguf_config is None:
        return {}
    return {"quantization_config": gguf_config(dequantize=True)}


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"$.engine.device: {name} is not there ({torch.cuda.device_count()} CUDA devices found); use auto or cpu"
        )
    return device


def _unsupported(folder: Path, model_type: str) -> ConfigError:
    known = ", ".join(f"{name} ({covers})" for name, covers in SUPPORTED.items())
    return ConfigError(f"$.engine.model: {folder} is of type {model_type}; supported: {known}")


def _broken(folder: Path, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigError(f"$.engine.model: {folder} cannot be loaded: {reason}")
