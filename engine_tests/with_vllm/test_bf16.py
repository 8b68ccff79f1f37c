"""What came back is bit by bit what was computed: in bf16, where any other bit would be another answer soon."""

from __future__ import annotations

import pytest
from harness import Engine, prompt, sources

ENGINE = {"max_num_batched_tokens": 256}


@pytest.mark.parametrize("length", [257, 256, 300, 31, 33])
def test_the_same_split_gives_the_same_answer(engine: Engine, length: int):
    ids = prompt(length, length)
    engine.ask(ids)
    wanted = engine.tokens(ids)
    engine.reset()
    (again,) = engine.ask(ids)
    full = (length - 1) // 32 * 32
    assert sources(again) == {"computed": length - full} | ({"dram": full} if full else {})
    assert list(again.outputs[0].token_ids) == wanted
