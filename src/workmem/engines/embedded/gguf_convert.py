"""GGUF to a folder of bf16 safetensors with tokenizer. Loads torch and transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from workmem.core.errors import ConfigError


def gguf_to_safetensors(source: Path, target: Path) -> None:
    """Write the model in the file `source` into the existing folder `target`.

    Weights pass through fp32, the exact value of every quantised weight, and are rounded once, to bf16.
    Raises ConfigError where the file is not a GGUF that `transformers` can read.
    """
    place = {"gguf_file": source.name, "local_files_only": True}
    folder = str(source.parent)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **place
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, **place)
    except (ValueError, KeyError, NotImplementedError, IndexError) as error:
        raise ConfigError(f"$.engine.model: {source} cannot be read as GGUF: {error}") from error
    # Tensor by tensor, so that no second copy of the whole model is held.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
