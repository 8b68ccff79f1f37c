"""Bytes of KV a token, from a model's configuration or its name, and what tiers hold of it."""

import json
import re
from pathlib import Path

import pytest

from workmem.cli.main import main
from workmem.core.errors import ConfigError
from workmem.core.layout import KVLayout
from workmem.core.units import format_bytes
from workmem.engines.known_shapes import SHAPES, known_shape
from workmem.engines.kv_size import KVShape, shape_from, size_of

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Llama-3.1-8B", 131_072),
        ("Llama-3.1-70B", 327_680),
        ("Qwen2.5-7B", 57_344),
        ("Qwen3-32B", 262_144),
        ("SmolLM2-135M", 23_040),
        ("DeepSeek-V3", 70_272),
    ],
)
def test_known_models(name, count):
    assert SHAPES[name].token_bytes() == count


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3-8B", "Llama-3-8B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct-AWQ", "Qwen2.5-7B"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "Qwen3-Coder-480B-A35B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "Mistral-Nemo"),
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek-V3"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("smollm2-135m-instruct", "SmolLM2-135M"),
    ],
)
def test_a_name_is_known_whoever_published_it(said, name):
    assert known_shape(said) is SHAPES[name]


@pytest.mark.parametrize(
    "name", ["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen3-9B", "Llama-3.1-Nemotron-70B", ""]
)
def test_another_model_is_not_taken_for_one_with_a_similar_name(name):
    assert known_shape(name) is None


def test_a_configuration_says_the_same_as_the_layout_that_the_store_uses():
    shape = shape_from("m", LLAMA)
    layout = KVLayout(dtype="bf16", layers=32, kv_heads=8, head_dim=128, block_tokens=16)
    assert shape.token_bytes() == layout.token_bytes
    assert shape == KVShape(name="m", layers=32, kv_heads=8, head_dim=128)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"head_dim": 64}, {"head_dim": 64}),
        ({"num_key_value_heads": None}, {"kv_heads": 32}),
        ({"torch_dtype": "torch.float16"}, {"dtype": "fp16"}),
        ({"dtype": "float32"}, {"dtype": "fp32"}),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {"kv_heads": 1, "head_dim": 576, "is_latent": True}),
        ({"sliding_window": 4096}, {"window_layers": 32, "window": 4096}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {}),
        (
            {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16},
            {"window_layers": 16, "window": 128},
        ),
    ],
)
def test_fields_that_decide(changes, wanted):
    plain = {"name": "m", "layers": 32, "kv_heads": 8, "head_dim": 128}
    assert shape_from("m", LLAMA | changes) == KVShape(**(plain | wanted))


def test_a_model_of_several_parts_is_read_by_its_text():
    assert shape_from("m", {"text_config": LLAMA, "torch_dtype": "float16"}).layers == 32


@pytest.mark.parametrize(
    ("config", "message"),
    [({}, "no num_hidden_layers"), (LLAMA | {"mamba_d_state": 16}, "a state per sequence")],
)
def test_what_cannot_be_told_is_not_guessed(config, message):
    with pytest.raises(ConfigError, match=message):
        shape_from("m", config)


@pytest.mark.parametrize(
    ("shape", "workers", "factor"),
    [("Llama-3.1-8B", 8, 1), ("Llama-3.1-8B", 16, 2), ("Qwen2.5-7B", 8, 2), ("DeepSeek-V3", 8, 8)],
)
def test_workers_that_hold_the_same_heads_count_twice(shape, workers, factor):
    assert SHAPES[shape].token_bytes(workers=workers) == factor * SHAPES[shape].token_bytes()


def test_what_tiers_hold_and_what_a_fleet_needs():
    answer = size_of(
        KVShape(name="m", layers=1, kv_heads=1, head_dim=64),
        dtype="fp8",
        workers=1,
        block_tokens=16,
        context=100,
        agents=3,
        sessions=2,
        tiers={"dram": 2048 * 21 + 1},
    )
    # 128 bytes a token, 2,048 a block, 7 blocks a context.
    assert (answer.token_bytes, answer.block_bytes, answer.context_bytes) == (128, 2048, 7 * 2048)
    held = answer.tiers["dram"]
    assert (held.tokens, held.contexts) == (21 * 16, 3)
    assert answer.advice == {"store.dram.bytes": 3 * 7 * 2048, "store.ssd.bytes": 3 * 7 * 2048}


def test_the_command_as_a_table_and_as_json(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["size", str(tmp_path), "--context", "32k", "--agents", "4", "--dram", "64GiB", "--ssd", "1TiB"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "131,072 bytes" in said
    assert 'store.dram.bytes = "16GiB"' in said
    assert 'store.ssd.bytes = "160GiB"' in said
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tiers"]["dram"] == {"bytes": 64 << 30, "tokens": 524_288, "contexts": 16}
    assert main(["size", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["Llama-3.1-8B"] == 131_072
    assert main(["size"]) == 0
    assert "DeepSeek-V3" in capsys.readouterr().out


def test_the_configured_sizes_are_taken(capsys):
    assert main(["size", "Llama-3.1-8B", "--json", "--set", "store.dram.bytes=4GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"]["dram"]["contexts"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody/nothing"], "no name known here"),
        (["Llama-3.1-8B", "--context", "long"], "--context long"),
        (["Llama-3.1-8B", "--agents", "0"], "--agents 0: at least 1"),
        (["Llama-3.1-8B", "--kv-dtype", "fp5"], "--kv-dtype fp5: one of"),
        (["Llama-3.1-8B", "--dram", "much"], "--dram: 'much' is no size"),
    ],
)
def test_what_was_said_wrong_is_one_line(words, message, capsys):
    assert main(["size", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_folder_with_something_else_in_it_is_told(tmp_path, capsys):
    (tmp_path / "config.json").write_text("[1]")
    assert main(["size", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_model_that_the_connector_does_not_take_says_so(capsys):
    assert main(["size", "gpt-oss-20b"]) == 0
    assert "not supported yet" in capsys.readouterr().out


def test_the_table_of_the_guide_is_what_the_command_says():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "vllm.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w.-]+) \| ([\d,]+) \| ([\d.]+ \w+) \|$", text, re.MULTILINE)
    assert len(rows) > 5
    for name, token, context in rows:
        count = SHAPES[name].token_bytes()
        assert (f"{count:,}", format_bytes(count * 32 * 1024)) == (token, context), name
