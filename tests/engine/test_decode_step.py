"""A decode step as one native call gives what the model's own modules give, and declines what it does not know."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workmem.engines.embedded import attention, decode_step, decode_weights, small_rows
from workmem.engines.embedded.kv_pages import KVPages
from workmem.engines.embedded.loader import LoadedModel, load
from workmem.engines.embedded.native import NativeKernel, load_kernel
from workmem.engines.embedded.runner import PackedRunner
from workmem.engines.embedded.scheduler import Work
from workmem.testing.tiny_models import KINDS, build_model

from .conftest import Bench

LENGTHS = (1, 2, 16, 17, 33, 255, 257, 490)
ODD = {
    "hidden_size": 60,
    "intermediate_size": 77,
    "num_attention_heads": 6,
    "head_dim": 24,
    "vocab_size": 331,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    "odd widths": ("llama", ODD | {"num_key_value_heads": 2}),
    "odd widths, norms": ("qwen3", ODD | {"num_key_value_heads": 3}),
    "odd widths, biases": ("qwen2", ODD | {"num_key_value_heads": 1, "hidden_size": 63}),
    "every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one key per query": ("llama", {"num_key_value_heads": 4}),
    "five queries a key": ("llama", {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "scaled positions": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 128,
            }
        },
    ),
}


@pytest.fixture(scope="module")
def kernel(engine_cache: Path) -> NativeKernel:
    found = load_kernel(engine_cache)
    assert found is not None, "tests need a C compiler (cc)"
    return found


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    attention.register()
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def open_model(folder: Path, dtype: str) -> LoadedModel:
    return load(folder, device="cpu", dtype=dtype, attn_implementation=attention.NAME)


@dataclasses.dataclass
class Page:
    """A page in dram, as a lease shows it."""

    data: bytearray

    def page(self, index: int) -> memoryview:
        assert index == 0
        return memoryview(self.data)


class World:
    """A loaded model over pages of random context, and sequences that decode from it."""

    def __init__(self, loaded: LoadedModel, kernel: NativeKernel | None, *, spilled: int = 0) -> None:
        torch.manual_seed(5)
        self.loaded = loaded
        size = loaded.layout.block_tokens
        self.pages = KVPages(loaded.layout, 1 + sum(-(-n // size) for n in LENGTHS), "cpu")
        self.pages.tensor.copy_(torch.randn(self.pages.tensor.shape))
        self.runner = PackedRunner(loaded.model, self.pages, kernel, "cpu")
        free = torch.randperm(self.pages.tensor.shape[0]).tolist()
        self.seqs: list[Any] = []
        for row, length in enumerate(LENGTHS):
            table = [free.pop() for _ in range(-(-length // size))]
            out = [(Page(bytearray(self.pages.row(block).tobytes())), 0) for block in table[:-1][:spilled]]
            tokens = [(row * 37 + at * 11) % 250 for at in range(length)]
            self.seqs.append(
                types.SimpleNamespace(
                    tokens=tokens, output_len=1, spilled=out, table=table[len(out) :], gate=None
                )
            )

    def work(self, rows: range = range(len(LENGTHS))) -> list[Work]:
        return [Work(self.seqs[row], LENGTHS[row] - 1, 1) for row in rows]

    def native(self, rows: range = range(len(LENGTHS))) -> torch.Tensor:
        assert self.runner._decode is not None
        return self.runner.run(self.work(rows)).clone()

    def by_modules(self, rows: range = range(len(LENGTHS))) -> torch.Tensor:
        step, self.runner._decode = self.runner._decode, None
        try:
            return self.runner.run(self.work(rows))
        finally:
            self.runner._decode = step


def exact(loaded: LoadedModel) -> None:
    """Have the modules multiply in fp32 whatever the number of rows."""
    for module in loaded.model.modules():
        if isinstance(module, small_rows.SmallRowsLinear):
            module.rows_max = 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_logits_and_the_stored_kv_are_those_of_the_modules(
    shape: str, dtype: str, tmp_path: Path, kernel: NativeKernel
) -> None:
    kind, overrides = SHAPES[shape]
    loaded = open_model(build_model(tmp_path / "m", kind, **overrides), dtype)
    exact(loaded)
    world = World(loaded, kernel)
    before = world.pages.tensor.clone()
    want, stored = world.by_modules(), world.pages.tensor.clone()
    world.pages.tensor.copy_(before)
    got = world.native()
    # A key that falls the other way when it is rounded moves logits by far more than the sums do.
    loose = {"fp32": {"atol": 1e-3, "rtol": 1e-4}, "bf16": {"atol": 0.05, "rtol": 0.02}}[dtype]
    torch.testing.assert_close(got, want, **loose)
    torch.testing.assert_close(world.pages.tensor, stored, **loose)
    assert not torch.equal(before, stored)


def test_weights_that_were_loaded_as_bf16_are_read_as_such(
    tiny: Path, kernel: NativeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor multiplies bf16, the modules keep no fp32 copy: the native step reads what there is."""
    twins = World(open_model(tiny, "bf16"), kernel).native()
    monkeypatch.setattr("workmem.engines.embedded.loader.has_bf16_arithmetic", lambda _: True)
    loaded = open_model(tiny, "bf16")
    assert loaded.model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(World(loaded, kernel).native(), twins)


def test_context_in_dram_is_read_where_it_lies(tiny: Path, kernel: NativeKernel) -> None:
    loaded = open_model(tiny, "bf16")
    want = World(loaded, kernel).native()
    world = World(loaded, kernel, spilled=9)
    for seq in world.seqs:
        assert len(seq.spilled) == min(9, -(-len(seq.tokens) // 16) - 1)
    held = {block for seq in world.seqs for block in seq.table}
    for block in set(range(world.pages.tensor.shape[0])) - held:
        world.pages.tensor[block] = 9.0
    assert torch.equal(world.native(), want)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", ["llama", "odd widths, norms"])
def test_a_row_has_the_same_bits_in_any_company_and_with_any_number_of_threads(
    shape: str, dtype: str, tmp_path: Path, kernel: NativeKernel
) -> None:
    kind, overrides = SHAPES[shape]
    world = World(open_model(build_model(tmp_path / "m", kind, **overrides), dtype), kernel)
    together = world.native()
    for count in range(1, len(LENGTHS)):
        torch.set_num_threads(1 + count % 3)
        for first in range(0, len(LENGTHS) - count + 1, 3):
            rows = range(first, first + count)
            assert torch.equal(world.native(rows), together[first : first + count])


def test_a_layer_waits_for_its_pages(tiny: Path, kernel: NativeKernel) -> None:
    loaded = open_model(tiny, "bf16")
    want = World(loaded, kernel).native()
    world = World(loaded, kernel)
    arriving = world.seqs[-1].table[:-1]
    whole = world.pages.tensor.clone()
    world.pages.tensor[arriving] = float("nan")
    waited: list[int] = []

    def arrive(layer: int) -> None:
        waited.append(layer)
        world.pages.tensor[arriving, layer] = whole[arriving, layer]

    world.seqs[-1].gate = types.SimpleNamespace(wait_layer=arrive)
    assert torch.equal(world.native(), want)
    assert waited == [0, 1, 2]


def test_a_step_that_is_not_all_decoding_goes_through_the_modules(
    tiny: Path, kernel: NativeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(open_model(tiny, "bf16"), kernel)
    rows: list[int] = []
    run = decode_step.DecodeStep.run
    monkeypatch.setattr(
        decode_step.DecodeStep,
        "run",
        lambda self, tokens, *more: rows.append(len(tokens)) or run(self, tokens, *more),
    )
    world.runner.run(world.work())
    world.seqs[0].output_len = 0
    world.runner.run(world.work())
    world.seqs[0].output_len = 1
    world.runner.run([Work(world.seqs[5], 200, 55), *world.work(range(3))])
    world.runner.run(world.work() * (decode_step.ROWS_MAX // len(LENGTHS) + 1))
    assert rows == [len(LENGTHS)]


def test_decoding_requests_of_an_engine_run_natively(bench: Callable[..., Bench]) -> None:
    world = bench()
    assert any("one native call" in note for note in world.engine.notes)
    assert world.engine.thread.runner._decode is not None
    steps: list[int] = []
    inner = world.engine.thread.runner._decode.run
    world.engine.thread.runner._decode.run = lambda tokens, *more: (
        steps.append(len(tokens)) or inner(tokens, *more)
    )

    async def run() -> None:
        await asyncio.gather(*(world.ask([7 * n + i for i in range(20)], 6) for n in range(3)))

    asyncio.run(run())
    assert sum(steps) >= 3 * 4


def _with_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def _with_pre_hook(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda *_: None)


def _with_hooked_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)


def _with_hooked_rotary(model: Any) -> None:
    model.model.rotary_emb.register_forward_pre_hook(lambda *_: None)


def _with_own_forward(model: Any) -> None:
    model.model.layers[2].self_attn.forward = lambda *_: None


def _with_adapter(model: Any) -> None:
    class Adapted(nn.Linear):
        pass

    model.model.layers[0].self_attn.q_proj = Adapted(64, 64, bias=False)


def _with_other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def _with_more_children(model: Any) -> None:
    model.model.layers[0].extra_norm = nn.Identity()


def _with_a_window(model: Any) -> None:
    model.model.layers[1].self_attn.sliding_window = 8


def _with_its_own_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.5


def _with_another_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def _with_a_plain_norm(model: Any) -> None:
    model.model.norm = nn.RMSNorm(64)


def _with_turned_weights(model: Any) -> None:
    linear = model.model.layers[0].self_attn.o_proj
    linear.twin = linear.twin.t().contiguous().t()


def _with_half_weights(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 96, bias=False, dtype=torch.float16)


def _with_mixed_weights(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 96, bias=False)


def _with_weights_elsewhere(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 96, bias=False, device="meta")


def _with_a_narrow_head(model: Any) -> None:
    model.lm_head = nn.Linear(64, 100, bias=False)


def _with_a_normed_embedding(model: Any) -> None:
    model.model.embed_tokens.max_norm = 1.0


def _with_another_rotary(model: Any) -> None:
    model.model.rotary_emb = nn.Identity()


def _with_an_unknown_body(model: Any) -> None:
    model.__class__ = type("Other", (type(model),), {})


CHANGES = {
    function.__name__[1:]: function for name, function in list(globals().items()) if name.startswith("_with_")
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_of_another_structure_is_left_to_its_modules(
    change: str, tiny: Path, kernel: NativeKernel
) -> None:
    loaded = open_model(tiny, "bf16")
    CHANGES[change](loaded.model)
    step, notes = decode_step.build(loaded.model, loaded.layout, kernel)
    assert step is None
    assert "Decoding runs on torch operators" in notes[0]
    weights, reason = decode_weights.collect(loaded.model, loaded.layout)
    assert weights is None
    assert reason


def test_positions_that_turn_parts_of_heads_are_left_to_the_modules(tiny: Path, kernel: NativeKernel) -> None:
    loaded = open_model(tiny, "bf16")
    rotary = loaded.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq[:4].clone()
    step, notes = decode_step.build(loaded.model, loaded.layout, kernel)
    assert step is None
    assert "parts of heads" in notes[0]


def test_without_a_kernel_the_modules_decode(tiny: Path, kernel: NativeKernel) -> None:
    loaded = open_model(tiny, "fp32")
    world = World(loaded, None)
    assert world.runner._decode is None
    assert world.runner.notes == ()
    want = World(loaded, kernel).native()
    torch.testing.assert_close(world.runner.run(world.work()), want, atol=1e-3, rtol=1e-4)


def test_a_copied_model_keeps_its_own_weights(tiny: Path, kernel: NativeKernel) -> None:
    """Addresses are taken from the model that is served, not from one that looks alike."""
    loaded = open_model(tiny, "fp32")
    other = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
    for parameter in other.model.parameters():
        parameter.mul_(0.5)
    assert not torch.equal(World(loaded, kernel).native(), World(other, kernel).native())
