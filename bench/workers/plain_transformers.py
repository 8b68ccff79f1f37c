"""Plain `transformers`: sdpa attention, its own KV cache, the whole batch in one forward pass."""

from __future__ import annotations

import time
from typing import Any

from protocol import Event, Run, serve


def load(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    torch.set_num_threads(options["threads"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options["dtype"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=dtype, attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], max_tokens: int) -> list[Event]:
        events: list[Event] = []
        start = time.perf_counter()
        ids = torch.tensor(prompts)
        cache = transformers.DynamicCache(config=model.config)
        for _ in range(max_tokens):
            logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            now = time.perf_counter() - start
            events += [(now, index, 1) for index in range(len(prompts))]
        return events

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return versions | {"threads": torch.get_num_threads()}, run


if __name__ == "__main__":
    serve(load)
