"""Settings of the embedded engine. Sizes take units ("512MiB"); defaults suit a laptop."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]


class EmbeddedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine]` of the configuration."""

    model: str = "smollm2-135m-instruct"
    """Folder of safetensors, a GGUF file, or the name of a prepared model (`workmem model list`)."""
    served_name: str = ""
    """Name on the wire; empty takes the folder's name."""
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Where the model computes; auto takes the first CUDA device, or the CPU where there is none."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of weights and KV. On a CPU without bf16 arithmetic sums run in fp32 over the same values."""
    deterministic: bool = False
    """Bit-identical logits for any batch, split or tier; needs fp32, slower."""
    vram_bytes: str | int = "512MiB"
    """KV pool of running requests, also on a CPU."""
    max_context: Annotated[int, Meta(ge=0)] = 0
    """Tokens of prompt and output together; 0 takes the model's own limit."""
    batch_tokens: Annotated[int, Meta(ge=16)] = 512
    """Most tokens computed in one step; long prompts are cut into pieces of this size."""
    running_max: Positive = 32
    """Most requests computed at the same time."""
    queue_max: Positive = 256
    """Most requests waiting; one more is refused with 429."""
    handoff_wait_max_s: Annotated[float, Meta(ge=0)] = 5.0
    """Longest that a request waits aside for blocks that were just computed elsewhere, whatever its handoff says. 0: never."""
    hint_ttl_s: Annotated[float, Meta(gt=0)] = 30.0
    """The store keeps what a hint asks to be kept for so long where the hint does not say."""
    hint_ttl_max_s: Annotated[float, Meta(gt=0)] = 3600.0
    """A hint that asks for more gets this."""
    default_max_tokens: Positive = 1024
    """Output bound of a request that names none. Admission commits it, so a small one admits more."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """Compute threads; 0 takes every core the process may use."""
