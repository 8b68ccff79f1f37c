"""vLLM on a CPU, in process, prefix caching off. Runs under vLLM's own Python."""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import Event, Run, serve


def load(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": options["cores"],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    import torch  # noqa: PLC0415 - after the environment is set
    import vllm  # noqa: PLC0415

    llm = vllm.LLM(
        model=options["model"],
        dtype={"bf16": "bfloat16", "fp32": "float32"}[options["dtype"]],
        max_model_len=options["max_context"],
        enforce_eager=not options["compile"],
        enable_prefix_caching=False,
    )
    engine = llm.llm_engine
    serial = 0

    def run(prompts: list[list[int]], max_tokens: int) -> list[Event]:
        nonlocal serial
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        seen: dict[str, tuple[int, int]] = {}
        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            name, serial = str(serial), serial + 1
            seen[name] = (index, 0)
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        events: list[Event] = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                index, before = seen[output.request_id]
                tokens = len(output.outputs[0].token_ids)
                if tokens > before:
                    events.append((now, index, tokens - before))
                    seen[output.request_id] = (index, tokens)
        return events

    return {"vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}, run


if __name__ == "__main__":
    serve(load)
