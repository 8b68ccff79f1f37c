"""What a request must satisfy before it is queued. Every refusal names the field, the value and the limit."""

from __future__ import annotations

import dataclasses

from workmem.core.errors import ClientError, ContextTooLong
from workmem.core.generation import GenerateRequest
from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.loader import LoadedModel
from workmem.store.contract import KVStore


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in tokens."""

    max_context: int
    vocabulary: int
    default_max_tokens: int
    vram_tokens: int
    dram_tokens: int
    block_tokens: int

    @classmethod
    def of(
        cls, config: EmbeddedConfig, loaded: LoadedModel, *, block_count: int, store: KVStore | None
    ) -> Limits:
        """The limits of an engine with a vram pool of `block_count` blocks over `store`."""
        layout = loaded.layout
        dram = store.dram_capacity_bytes() // layout.page_bytes if store is not None else 0
        return cls(
            max_context=min(loaded.max_context, config.max_context or loaded.max_context),
            vocabulary=loaded.vocabulary,
            default_max_tokens=config.default_max_tokens,
            vram_tokens=block_count * layout.block_tokens,
            dram_tokens=dram * layout.block_tokens,
            block_tokens=layout.block_tokens,
        )


def check(request: GenerateRequest, limits: Limits) -> int:
    """Refuse what cannot be served, with ClientError or ContextTooLong; returns the output bound in tokens."""
    prompt = len(request.token_ids)
    if prompt == 0:
        raise ClientError("the prompt is empty: send at least one token", param="prompt")
    low, high = min(request.token_ids), max(request.token_ids)
    if low < 0 or high >= limits.vocabulary:
        bad = low if low < 0 else high
        raise ClientError(f"token id {bad} is outside the vocabulary of {limits.vocabulary}", param="prompt")
    if prompt >= limits.max_context:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens and the model's context is {limits.max_context}: "
            f"send at most {limits.max_context - 1}",
            param="messages",
        )
    asked = request.sampling.max_tokens
    max_tokens = min(limits.default_max_tokens, limits.max_context - prompt) if asked is None else asked
    if max_tokens < 1:
        raise ClientError(f"max_tokens is {max_tokens}: ask for at least 1", param="max_tokens")
    total = prompt + max_tokens
    if total > limits.max_context:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens and max_tokens is {max_tokens}, together {total}; the model's context is "
            f"{limits.max_context}: lower max_tokens to {limits.max_context - prompt} or shorten the prompt",
            param="max_tokens",
        )
    _check_pool(request, total, limits)
    return max_tokens


def _check_pool(request: GenerateRequest, total: int, limits: Limits) -> None:
    """A context larger than the vram pool is read from dram in place, if it fits there and may be kept there."""
    if total <= limits.vram_tokens:
        return
    if request.reuse and total <= limits.dram_tokens:
        return
    why = (
        "reuse is off for this request, so it may not be kept in dram"
        if not request.reuse
        else (f"dram holds {limits.dram_tokens} tokens")
    )
    raise ContextTooLong(
        f"the request needs {total} tokens of KV; vram holds {limits.vram_tokens} and {why}: "
        "raise engine.vram_bytes or store.dram.bytes",
        param="messages",
    )
