"""Contexts of an adapter are its own: of its files, whatever its name."""

from __future__ import annotations

import json
from pathlib import Path

from harness import prompt, sources

ENGINE = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_num_batched_tokens": 256}
LENGTH = 130


def adapter(folder: Path, model: Path, seed: int) -> Path:
    """Weights drawn by chance for every query projection."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    torch.manual_seed(seed)
    prefix = "base_model.model.model.layers"
    weights = {}
    for layer in range(layers):
        weights[f"{prefix}.{layer}.self_attn.q_proj.lora_A.weight"] = torch.randn(8, width) * 0.2
        weights[f"{prefix}.{layer}.self_attn.q_proj.lora_B.weight"] = torch.randn(width, 8) * 0.2
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 8,
                "lora_alpha": 16,
                "target_modules": ["q_proj"],
                "bias": "none",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "",
            }
        )
    )
    return folder


def ask(engine, ids: list[int], name: str, number: int, folder: Path):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    (answer,) = engine.llm.generate(
        [{"prompt_token_ids": ids}],
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        lora_request=LoRARequest(name, number, str(folder)) if number else None,
        use_tqdm=False,
    )
    return answer


def test_adapters_and_the_model_itself_never_meet(engine, smollm2: Path, tmp_path: Path):
    one, two = adapter(tmp_path / "one", smollm2, 1), adapter(tmp_path / "two", smollm2, 2)
    ids = prompt(LENGTH, 1)
    first = ask(engine, ids, "one", 1, one)
    assert sources(first)["computed"] == LENGTH
    hit = ask(engine, ids, "one", 1, one)
    engine.reset()
    assert sources(ask(engine, ids, "two", 2, two))["computed"] == LENGTH
    assert sources(ask(engine, ids, "", 0, one))["computed"] == LENGTH
    engine.reset()
    again = ask(engine, ids, "one", 1, one)
    assert sources(again) == {"dram": 128, "computed": 2}
    assert list(again.outputs[0].token_ids) == list(hit.outputs[0].token_ids)


def test_an_adapter_that_is_loaded_anew_under_its_name_hits_nothing(engine, smollm2: Path, tmp_path: Path):
    folder = adapter(tmp_path / "same", smollm2, 3)
    ids = prompt(LENGTH, 2)
    ask(engine, ids, "same", 3, folder)
    engine.reset()
    adapter(tmp_path / "same", smollm2, 4)
    assert sources(ask(engine, ids, "same", 4, folder))["computed"] == LENGTH


def test_an_adapter_that_cannot_be_read_is_served_and_not_kept(
    engine, smollm2: Path, tmp_path: Path, monkeypatch
):
    from workmem.engines.vllm import adapters

    def unreadable(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(adapters, "identify_adapter", unreadable)
    answer = ask(engine, prompt(LENGTH, 3), "gone", 5, adapter(tmp_path / "gone", smollm2, 5))
    assert len(answer.outputs[0].token_ids) == 4
    assert answer.kv_transfer_params is None
    assert not engine.connector._guard.off
