"""Tiny random-weight models of every supported kind, with a byte-level tokenizer.

Made from a seed in well under a second, they exercise the same code as a real model: grouped heads,
biases where the kind has them, tied and untied output embeddings, safetensors, a ChatML template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

Kind = Literal["llama", "qwen2", "qwen3", "mistral", "smollm3"]
KINDS: tuple[Kind, ...] = ("llama", "qwen2", "qwen3", "mistral", "smollm3")

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 320
"""256 bytes, the special tokens, some merges, and unused rows as real checkpoints have them."""

_MERGES = ("t h", "th e", "i n", "a n", "e r", "o n", "Ġ t", "Ġ a", "Ġt h", "an d")

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML that knows tools, so that spans of definitions and calls can be tested."""


def build_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write a byte-level BPE tokenizer (256 bytes, ten merges, ChatML tokens) into `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for merge in _MERGES:
        left, right = merge.split(" ")
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[2], pad_token=SPECIAL_TOKENS[0]
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def build_model(
    folder: Path,
    kind: Kind = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    chat_template: str | None = CHAT_TEMPLATE,
    **overrides: Any,
) -> Path:
    """Write a model of `kind` with random weights and its tokenizer into `folder`; returns `folder`.

    The default has 3 layers, 4 query and 2 KV heads of 16, a hidden size of 64 and 512 positions;
    `overrides` go to the transformers configuration. The same seed gives the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(kind, overrides)
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # The stock initialisation is so small that every position looks alike and biases vanish.
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.2)
                elif "norm" in name:
                    parameter.normal_(1.0, 0.1)
                elif parameter.dim() == 2 and "embed" not in name:
                    parameter.normal_(0.0, 1.3 * parameter.shape[1] ** -0.5)
                else:
                    parameter.normal_(0.0, 0.6)
    model.to(dtype).save_pretrained(folder)
    build_tokenizer(folder, chat_template=chat_template)
    return folder


def _config(kind: Kind, overrides: dict[str, Any]) -> PreTrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind in ("llama", "smollm3"),
        "bos_token_id": None,
        "eos_token_id": 268,
        "pad_token_id": 266,
    }
    per_kind: dict[str, Any] = {
        "qwen3": {"head_dim": 32},
        "mistral": {"head_dim": 16, "sliding_window": None},
        "smollm3": {"no_rope_layer_interval": 2},
    }
    return AutoConfig.for_model(kind, **common | per_kind.get(kind, {}) | overrides)
