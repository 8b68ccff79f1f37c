"""How far logits move when the same prompt is computed in other pieces, in the default (fast) mode.

    python bench/exactness.py --model MODEL

For prompts of natural text: logits of the last token when the prompt is computed in one go, against the
same in random pieces, as after a cache hit (all blocks kept, only the tail computed) and as a decode
step. Prints, for fp32 and bf16, the largest difference of any logit, how often the first choice agrees,
and the largest lead (logit of the first choice over the second) that was ever overturned. An epsilon
above both is what the default mode may be trusted to: beyond it the greedy token is the same. At the
end, what the deterministic mode costs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import msgspec
import torch
from harness import RESULTS, Texts, environment, write_result
from rich.console import Console
from rich.progress import track

from workmem.config import cache_dir
from workmem.core.generation import GenerateRequest, SamplingParams
from workmem.core.layout import BLOCK_TOKENS
from workmem.engines.embedded import attention, tiles
from workmem.engines.embedded.kv_pages import KVPages
from workmem.engines.embedded.loader import load
from workmem.engines.embedded.native import load_kernel
from workmem.engines.embedded.runner import PackedRunner, Runner
from workmem.engines.embedded.scheduler import Work
from workmem.engines.embedded.sequence import Sequence

ROUNDS, DECODED = 3, 16
"""Of what the modes cost: times each is measured, and decode steps timed."""


class Found(msgspec.Struct):
    """One dtype. Logits are natural units of the model's output layer."""

    dtype: str
    comparisons: int = 0
    agreed: int = 0
    difference_max: float = 0.0
    lead_overturned_max: float = 0.0

    def compare(self, whole: torch.Tensor, pieced: torch.Tensor) -> None:
        """Book one pair of logit rows."""
        self.comparisons += 1
        self.difference_max = max(self.difference_max, float((whole - pieced).abs().max()))
        if int(whole.argmax()) == int(pieced.argmax()):
            self.agreed += 1
        else:
            best = whole.topk(2).values
            self.lead_overturned_max = max(self.lead_overturned_max, float(best[0] - best[1]))


def logits_of(
    runner: Runner, tokens: list[int], cuts: list[int], took: list[float] | None = None
) -> torch.Tensor:
    """Logits of the last token, computed up to each of `cuts` in turn. `took` gets the seconds of each."""
    request = GenerateRequest(id="x", token_ids=tokens, sampling=SamplingParams())
    seq = Sequence(request, root=b"r" * 32, block_tokens=BLOCK_TOKENS, max_tokens=1, arrived=0.0, emit=print)
    seq.table = list(range(-(-len(tokens) // BLOCK_TOKENS)))
    logits = torch.empty(0)
    for cut in cuts:
        start = time.perf_counter()
        logits = runner.run([Work(seq, seq.computed, cut - seq.computed)])
        seq.computed = cut
        if took is not None:
            took.append(time.perf_counter() - start)
    return logits[0].clone()


def measure(folder: Path, dtype: str, prompts: list[list[int]], rng: random.Random) -> Found:
    """All prompts in all ways of cutting them."""
    attention.register()
    loaded = load(folder, device="cpu", dtype=dtype, attn_implementation=attention.NAME)
    pages = KVPages(loaded.layout, 1 + max(map(len, prompts)) // BLOCK_TOKENS, "cpu")
    runner = PackedRunner(loaded.model, pages, load_kernel(cache_dir()), "cpu")
    found = Found(dtype)
    with torch.inference_mode():
        for tokens in track(prompts, description=dtype):
            size = len(tokens)
            whole = logits_of(runner, tokens, [size])
            hit = (size - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            pieces = sorted({rng.randrange(1, size) for _ in range(rng.randrange(1, 6))})
            for cuts in ([hit, size], [size - 1, size], [*pieces, size]):
                found.compare(whole, logits_of(runner, tokens, cuts))
    return found


def cost(folder: Path, tokens: list[int]) -> dict[str, dict[str, float]]:
    """Tokens per second of both modes in fp32: a prompt alone, then one request decoding behind it."""
    tiles.register()
    attention.register()
    found: dict[str, dict[str, float]] = {}
    for mode, name, arithmetic in (("fast", attention.NAME, "fast"), ("deterministic", tiles.NAME, "fixed")):
        loaded = load(folder, device="cpu", dtype="fp32", attn_implementation=name, arithmetic=arithmetic)
        pages = KVPages(loaded.layout, 2 + len(tokens) // BLOCK_TOKENS, "cpu")
        packed = PackedRunner(loaded.model, pages, load_kernel(cache_dir()), "cpu")
        runner = packed if mode == "fast" else tiles.TileRunner(loaded.model, pages)
        size = len(tokens)
        prompt_s: list[float] = []
        steps_s: list[float] = []
        with torch.inference_mode():
            # The first one warms up.
            for _ in range(1 + ROUNDS):
                took: list[float] = []
                logits_of(runner, tokens, [size], prompt_s)
                logits_of(runner, tokens, [size - DECODED, *range(size - DECODED + 1, size + 1)], took)
                steps_s.append(sum(took[1:]))
        prefill_s, decode_s = statistics.median(prompt_s[1:]), statistics.median(steps_s[1:])
        found[mode] = {"prefill_tokens_s": size / prefill_s, "decode_tokens_s": DECODED / decode_s}
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--workloads", type=Path, default=None)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "exactness.json")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    texts = Texts(options.model, options.workloads, options.seed)
    prompts = [texts.prompt(rng.randrange(40, 300)) for _ in range(options.prompts)]
    results = [measure(options.model, dtype, prompts, rng) for dtype in ("fp32", "bf16")]
    for found in results:
        Console().print(msgspec.to_builtins(found))
    modes = cost(options.model, texts.prompt(256))
    Console().print(modes)
    body = {
        "bench": "exactness",
        "machine": environment(),
        "seed": options.seed,
        "rows": msgspec.to_builtins(results),
        "cost": modes,
    }
    write_result(options.out, body)


if __name__ == "__main__":
    main()
