"""What decides the bytes of an engine's KV blocks, and so who may share them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from workmem.core.keys import KEY_BYTES
from workmem.core.layout import DTYPE_BYTES, DType, KVLayout, Namespace
from workmem.store.contract import KVStore

SCOPES_MAX = 512
"""Remembered, those used last; the store is told of another one anew. Clients choose salts."""
SALT_MAX = 4096
"""Characters. The store is told a salt with each namespace: contexts of a longer one are not kept."""
_NAMES: dict[str, DType] = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.uint8": "u8",
}


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Read from vLLM's configuration by the plugin; equal on both sides of the connector."""

    version: str
    """vLLM's `major.minor`: another one may order the bytes of a block, or round, in another way."""
    model: str
    """Folder of the weights."""
    dtype: str
    """What the model computes in, as torch writes it."""
    cache_dtype: str
    """What KV is kept in, as torch writes it."""
    order: str
    """vLLM's name for the order of a block's bytes, with the kind of processor where that decides it."""
    quantization: str
    rope: str
    block_tokens: int
    layers: int
    """Of one worker."""
    kv_heads: int
    """Of one worker."""
    head_dim: int
    layer_bytes: int
    """Bytes of one block in one layer."""
    workers: int
    """Tensor-parallel size: each holds its own heads of every block."""
    hashing: str
    """Algorithm, seed and Python that make block hashes."""
    hash_bytes: int

    def refusal(self) -> str:
        """Why blocks of this engine cannot be kept; empty when they can."""
        if self.hash_bytes != KEY_BYTES:
            return (
                f"block hashes have {self.hash_bytes} bytes and are no proof of what is in a block; "
                "start vLLM with --prefix-caching-hash-algo sha256_cbor"
            )
        if self.layer_bytes % (2 * self.block_tokens):
            return f"{self.layer_bytes} bytes per layer do not divide by {self.block_tokens} tokens"
        return ""

    def layout(self, rank: int) -> KVLayout:
        """The layout of what worker `rank` keeps of a block."""
        dtype = _NAMES.get(self.cache_dtype, "u8")
        heads, dim = self.kv_heads, self.head_dim
        if 2 * self.block_tokens * heads * dim * DTYPE_BYTES[dtype] != self.layer_bytes:
            # Packed or padded in a way of its own: bytes, then.
            dtype, heads, dim = "u8", 1, self.layer_bytes // (2 * self.block_tokens)
        return KVLayout(
            dtype=dtype,
            layers=self.layers,
            kv_heads=heads,
            head_dim=dim,
            block_tokens=self.block_tokens,
            rope=self.rope,
            page_order=f"vllm-{self.version}/{self.order}/{self.dtype}/{self.cache_dtype}/{self.hashing}",
            quantization=self.quantization,
            rank=rank,
            world_size=self.workers,
        )


class Scope(msgspec.Struct, frozen=True):
    """Whose blocks: what of a namespace may change from request to request."""

    adapter: str = ""
    salt: str = ""

    @classmethod
    def of(cls, adapter: str, salt: str | None) -> Scope:
        """As a request says it. A salt may hold what no text can be written with: half a surrogate pair."""
        return cls(adapter, (salt or "").encode(errors="backslashreplace").decode())


class Namespaces:
    """The namespaces of an engine, declared to the store as requests need them."""

    def __init__(self, facts: EngineFacts, fingerprint: str, store: KVStore) -> None:
        self._facts = facts
        self._fingerprint = fingerprint
        self._store = store
        self._epoch = 0
        self._known: OrderedDict[Scope, tuple[Namespace, tuple[bytes, ...]]] = OrderedDict()

    def of(self, scope: Scope) -> tuple[Namespace, tuple[bytes, ...]]:
        """The namespace of the first worker, and the root of every worker's."""
        known = self._known.get(scope)
        if known is None:
            spaces = list(self._each(scope))
            roots = tuple(self._store.register(space) for space in spaces)
            known = self._known[scope] = (spaces[0], roots)
            if len(self._known) > SCOPES_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(scope)
        return known

    @property
    def epoch(self) -> int:
        """The present one."""
        return self._epoch

    def start_epoch(self, epoch: int) -> None:
        """What was stored so far is of other weights, or is not wanted: nothing of it is a hit from now on."""
        self._epoch = epoch
        self._known.clear()

    def _each(self, scope: Scope) -> Iterator[Namespace]:
        for rank in range(self._facts.workers):
            yield Namespace(
                model_fingerprint=self._fingerprint,
                layout=self._facts.layout(rank),
                weights_epoch=self._epoch,
                adapter=scope.adapter,
                tenant_salt=scope.salt,
            )
