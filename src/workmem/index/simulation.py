"""What an engine's own prefix cache would find of a sequence of prompts, without the engine."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

_DIGEST_BYTES = 16


class CacheSimulation:
    """Full blocks of `block` tokens, each known by all before it, as vLLM has them; 1 is to the token, as SGLang's radix tree.

    The last token of a prompt is never found: it is computed to get logits. At most `tokens_max` tokens are held
    (None: all), and what was used longest ago leaves first, the end of a prompt before its beginning. Answers are not
    kept, for nobody wrote down their tokens: what a real cache finds of them comes on top.
    """

    def __init__(self, block: int, tokens_max: int | None = None) -> None:
        """Raises ValueError where a block has no token, or where not one block could be held."""
        if block < 1 or (tokens_max is not None and tokens_max < block):
            raise ValueError(f"no cache of {tokens_max} tokens in blocks of {block}")
        self._block = block
        self._blocks_max = None if tokens_max is None else tokens_max // block
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that are held."""
        return len(self._held)

    def ask(self, token_ids: Sequence[int], space: str = "") -> int:
        """How many tokens of a prompt are found; from then on all its full blocks are held. Spaces share nothing."""
        keys = list(self._keys(token_ids, space))
        usable = (len(token_ids) - 1) // self._block if token_ids else 0
        found = next((i for i, key in enumerate(keys[:usable]) if key not in self._held), usable)
        # From the end: what is touched last leaves last.
        for key in reversed(keys):
            self._held[key] = None
            self._held.move_to_end(key)
        while self._blocks_max is not None and len(self._held) > self._blocks_max:
            self._held.popitem(last=False)
        return found * self._block

    def _keys(self, token_ids: Sequence[int], space: str) -> Iterator[bytes]:
        parent = hashlib.blake2b(space.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
        data, step = array("I", token_ids).tobytes(), 4 * self._block
        for start in range(0, len(data) - step + 1, step):
            parent = hashlib.blake2b(parent + data[start : start + step], digest_size=_DIGEST_BYTES).digest()
            yield parent
