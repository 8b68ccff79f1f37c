import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from workmem.core.errors import ConfigError
from workmem.engines.embedded import small_rows
from workmem.engines.embedded.loader import SUPPORTED, load
from workmem.testing.tiny_models import KINDS, VOCABULARY, build_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "model")


def open_model(folder, **more):
    return load(folder, **{"device": "cpu", "dtype": "bf16", "attn_implementation": "sdpa"} | more)


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def test_every_family_that_is_served_is_tried():
    assert set(KINDS) == set(SUPPORTED)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_computes_what_transformers_computes(kind, tmp_path):
    folder = build_model(tmp_path, kind, dtype=torch.float32)
    loaded = open_model(folder, dtype="fp32")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(24)[None]
    with torch.inference_mode():
        got, want = loaded.model(tokens).logits, reference(tokens).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert loaded.layout.layers == 3
    assert loaded.layout.kv_heads == 2
    assert loaded.layout.head_dim == (32 if kind == "qwen3" else 16)
    assert loaded.max_context == 512
    assert loaded.vocabulary == VOCABULARY
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not loaded.model.training


def test_bf16_values_are_computed_in_fp32_where_the_cpu_has_no_bf16(llama, monkeypatch):
    monkeypatch.setattr("workmem.engines.embedded.loader.has_bf16_arithmetic", lambda device: False)
    loaded = open_model(llama)
    weight = loaded.model.model.embed_tokens.weight
    assert loaded.compute_dtype == weight.dtype == torch.float32
    assert torch.equal(weight, weight.bfloat16().float())
    assert loaded.layout.dtype == "bf16"


def test_frequencies_of_positions_are_never_rounded(llama, monkeypatch):
    monkeypatch.setattr("workmem.engines.embedded.loader.has_bf16_arithmetic", lambda device: True)
    loaded = open_model(llama)
    reference = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    assert loaded.model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)


def test_fixed_arithmetic_leaves_the_models_own_modules(llama):
    loaded = open_model(llama, dtype="fp32", arithmetic="fixed")
    assert {type(module).__module__ for module in loaded.model.modules()} <= {
        "torch.nn.modules.linear",
        "torch.nn.modules.sparse",
        "torch.nn.modules.container",
        "transformers.activations",
        "transformers.models.llama.modeling_llama",
    }
    assert loaded.notes == ()


def test_layout_tells_rope_settings_apart(folder):
    plain = open_model(folder).layout
    edit_config(folder, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert open_model(folder).layout != plain


def test_a_sliding_window_limits_the_context(tmp_path):
    loaded = open_model(build_model(tmp_path, "mistral", sliding_window=128))
    assert loaded.max_context == 128
    assert "128 tokens" in " ".join(loaded.notes)
    assert loaded.config.sliding_window is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, r"bert.*supported: llama"),
        ({"model_type": "no-such-model"}, r"no-such-model|supported"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            r"rope type 'dynamic'",
        ),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"num_hidden_layers": 4}, r"lacks \d+ weights"),
        ({"hidden_size": 128}, "cannot be loaded"),
    ],
)
def test_what_cannot_be_served_stops_the_start(folder, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        open_model(edit_config(folder, **change))
    assert str(caught.value).startswith("$.engine.model: ")


def test_sliding_layers_are_refused(tmp_path):
    folder = build_model(tmp_path, "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    with pytest.raises(ConfigError, match="sliding_attention"):
        open_model(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="neither a folder"):
        open_model(tmp_path / "nothing")


def test_a_folder_without_safetensors_is_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        open_model(folder)


def test_a_folder_without_config_is_named(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_model(folder)


@pytest.mark.parametrize("keep", [0, 7, 5000])
def test_truncated_weights_stop_the_start(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut short or damaged .* download it again"):
        open_model(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_that_may_not_be_read_are_named(folder, monkeypatch, name):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != name)
    with pytest.raises(ConfigError, match=rf"{name} may not be read"):
        open_model(folder)


def test_a_folder_that_may_not_be_read_is_named(folder, monkeypatch):
    is_file = Path.is_file

    def refuse(self):
        if self.parent == folder:
            raise PermissionError(13, "Permission denied", str(self))
        return is_file(self)

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ConfigError, match=rf"{folder.name} may not be read"):
        open_model(folder)


def test_a_config_that_is_not_json_stops_the_start(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        open_model(folder)


def test_an_absent_device_stops_the_start(llama):
    with pytest.raises(ConfigError, match=r"\$\.engine\.device"):
        open_model(llama, device="cuda:99")


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 8) | st.integers(90, 100), bias=st.booleans(), seed=st.integers(0, 99))
def test_small_rows_agree_with_fp32_to_bf16_rounding(rows, bias, seed):
    torch.manual_seed(seed)
    linear = torch.nn.Linear(96, 160, bias=bias)
    linear.weight.data = linear.weight.data.bfloat16().float()
    x = torch.randn(1, rows, 96)
    with torch.inference_mode():
        want = linear(x)
        got = small_rows.SmallRowsLinear(linear, 4)(x)
        head = small_rows.SmallRowsHead(linear, 4)(x)
    assert got.dtype == head.dtype == torch.float32
    assert got.shape == head.shape == want.shape
    if rows > 4:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(head.amax(-1), want.amax(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(head.argmax(-1), want.argmax(-1))


def test_attach_keeps_tied_embeddings_and_the_answer(llama):
    loaded = open_model(llama, dtype="fp32", arithmetic="fixed")
    tokens = torch.arange(3)[None]
    with torch.inference_mode():
        want = loaded.model(tokens).logits
        notes = small_rows.attach(loaded.model)
        got = loaded.model(tokens).logits
    assert "22 linear layers" in notes[0]
    assert isinstance(loaded.model.lm_head, small_rows.SmallRowsHead)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.3)
