"""What the bytes of a page mean: `KVLayout`, and `Namespace`, the root of every block's identity.

A page is the KV of one block in one medium, in the order [layer, K|V, token, head, dim], C-contiguous.
The same bytes are a page in vram, dram, ssd and remote, so that moving a page is one copy.

A page is checked in *slices* of whole layers, so that layer i can be verified and used while layer
i+1 is still on its way. A slice is at least SLICE_BYTES_MIN long: below that the cost per call
outweighs the overlap.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

SLICE_BYTES_MIN = 60 * 1024
BLOCK_TOKENS = 16

DType = Literal["bf16", "fp16", "fp32", "u8"]
"""What a page's numbers are. `u8` is bytes of which only the engine that wrote them knows more (`page_order`)."""
DTYPE_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "u8": 1}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides how to read a page. Two layouts that differ anywhere never share a hit."""

    dtype: DType
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = BLOCK_TOKENS
    rope: str = ""
    """Canonical JSON of the model's RoPE parameters: keys are stored rotated."""
    page_order: str = "LKNHD"
    quantization: str = "none"
    rank: int = 0
    world_size: int = 1

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's K and V of one block."""
        return 2 * self.block_tokens * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token."""
        return self.page_bytes // self.block_tokens

    @property
    def layers_per_slice(self) -> int:
        """Layers in each slice but perhaps the last."""
        return min(self.layers, -(-SLICE_BYTES_MIN // self.layer_bytes))

    @property
    def slice_count(self) -> int:
        """Slices, and so checksums, per page."""
        return -(-self.layers // self.layers_per_slice)

    def slice_span(self, index: int) -> tuple[int, int]:
        """Byte range [start, end) of slice `index` inside a page."""
        step = self.layers_per_slice
        return index * step * self.layer_bytes, min((index + 1) * step, self.layers) * self.layer_bytes

    def slice_of_layer(self, layer: int) -> int:
        """The slice that carries `layer`."""
        return layer // self.layers_per_slice


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Who may share KV with whom. Blocks of two namespaces can never be hits of each other."""

    model_fingerprint: str
    """Digest of the weights (or an immutable revision), never a display name."""
    layout: KVLayout
    weights_epoch: int = 0
    adapter: str = ""
    tenant_salt: str = ""
    arithmetic: str = ""
    """Set where results are promised to the bit: the kind of sums that made them. Empty where they agree
    within rounding and may be shared by all."""

    def of_rank(self, rank: int) -> Namespace:
        """The namespace of another worker of the same engine."""
        return msgspec.structs.replace(self, layout=msgspec.structs.replace(self.layout, rank=rank))

    def root(self) -> bytes:
        """The 32-byte first parent of every chain of this namespace (SHA-256 of all fields)."""
        return hashlib.sha256(b"workmem.namespace.1\0" + msgspec.json.encode(self, order="sorted")).digest()
