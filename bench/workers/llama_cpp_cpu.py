"""llama.cpp through llama-cpp-python: a GGUF file, one KV stream per sequence."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from protocol import Event, Run, serve

UBATCH_TOKENS = 512


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _swallow(_level: int, _text: bytes, _data: int) -> None:  # C keeps this pointer for good
    """Swallow the library's log."""


def load(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    import llama_cpp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    llama_cpp.llama_log_set(_swallow, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        options["model"].encode(), llama_cpp.llama_model_default_params()
    )
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def best(context: Any, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax())

    def decode(context: Any, batch: Any, rows: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, int(wants_logits)
        if (code := llama_cpp.llama_decode(context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def run(prompts: list[list[int]], max_tokens: int) -> list[Event]:
        params = llama_cpp.llama_context_default_params()
        longest = max(map(len, prompts)) + max_tokens
        params.n_ctx = len(prompts) * (-(-longest // 256) * 256)
        params.n_seq_max = len(prompts)
        params.n_batch = params.n_ubatch = UBATCH_TOKENS
        params.n_threads = params.n_threads_batch = options["threads"]
        context = llama_cpp.llama_init_from_model(model, params)
        batch = llama_cpp.llama_batch_init(UBATCH_TOKENS, 0, 1)
        events: list[Event] = []
        start = time.perf_counter()
        tokens: list[int] = []
        for sequence, prompt in enumerate(prompts):
            for begin in range(0, len(prompt), UBATCH_TOKENS):
                piece = prompt[begin : begin + UBATCH_TOKENS]
                last = len(prompt) - 1 - begin
                decode(context, batch, [(t, begin + i, sequence, i == last) for i, t in enumerate(piece)])
            tokens.append(best(context, -1))
            events.append((time.perf_counter() - start, sequence, 1))
        for step in range(max_tokens - 1):
            decode(context, batch, [(t, len(prompts[i]) + step, i, True) for i, t in enumerate(tokens)])
            tokens = [best(context, i) for i in range(len(prompts))]
            now = time.perf_counter() - start
            events += [(now, i, 1) for i in range(len(prompts))]
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return events

    return {"llama-cpp-python": llama_cpp.__version__, "threads": options["threads"]}, run


if __name__ == "__main__":
    serve(load)
