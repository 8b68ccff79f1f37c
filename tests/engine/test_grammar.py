import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.core.errors import ClientError, EngineError
from workmem.engines.embedded import grammar
from workmem.engines.embedded.grammar import Grammar
from workmem.engines.embedded.tokenizer import ModelTokenizer
from workmem.testing.tiny_models import VOCABULARY, build_tokenizer

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "count": {"type": "integer"},
            "names": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        },
        "required": ["count", "names"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return ModelTokenizer(folder)


def write(tokenizer, schema, seed, vocabulary=VOCABULARY, most=600):
    """Follow random logits under the mask to the end."""
    one = Grammar.compile(schema, tokenizer, vocabulary=vocabulary)
    generator = torch.Generator().manual_seed(seed)
    ids = []
    while not one.is_done and len(ids) < most:
        row = torch.randn(vocabulary, generator=generator)
        one.mask(row)
        token = int(row.argmax())
        if token in tokenizer.eos_ids:
            assert one.is_complete
            break
        one.accept(token)
        ids.append(token)
    return tokenizer.decode(ids), one


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_random_choices_under_the_mask_satisfy_the_schema(tiny, seed):
    text, one = write(tiny, SCHEMA, seed)
    assert one.is_complete
    value = json.loads(text)
    assert isinstance(value["count"], int)
    assert all(len(name) <= 4 for name in value["names"])
    assert value.keys() == {"count", "names"}


@pytest.mark.parametrize("schema", [SCHEMA, "{}", '{"type": "object"}'])
def test_answers_are_one_line(tiny, schema):
    for seed in range(8):
        text, _ = write(tiny, schema, seed, most=200)
        outside_strings = re.sub(r'"(?:[^"\\]|\\.?)*("|$)', "", text)
        assert not re.search(r"[,:](?! |$)|(?<![,:])\s|\s\s", outside_strings), text


def test_any_json_value_is_allowed_by_the_empty_schema(tiny):
    one = Grammar.compile("{}", tiny, vocabulary=VOCABULARY)
    for token in tiny.encode('{"a": [1, "b", null, {"c": false}]}'):
        row = torch.zeros(VOCABULARY)
        one.mask(row)
        assert row[token] == 0.0
        one.accept(token)
    assert one.is_complete


def test_rows_beyond_the_tokenizer_are_never_allowed(tiny):
    row = torch.zeros(VOCABULARY)
    Grammar.compile("{}", tiny, vocabulary=VOCABULARY).mask(row)
    assert torch.isinf(row[269:]).all()
    assert not torch.isinf(row[tiny.encode("{")[0]])


def test_a_token_outside_the_schema_is_an_engine_error(tiny):
    one = Grammar.compile(SCHEMA, tiny, vocabulary=VOCABULARY)
    with pytest.raises(EngineError, match="does not continue"):
        one.accept(tiny.encode("x")[0])


@pytest.mark.parametrize(
    "schema", ["{", "[]", '"object"', '{"type": "nonsense"}', '{"$ref": "http://a.b/c"}']
)
def test_a_bad_schema_is_the_clients_error(tiny, schema):
    with pytest.raises(ClientError) as caught:
        Grammar.compile(schema, tiny, vocabulary=VOCABULARY)
    assert caught.value.param == "response_format"


def test_a_missing_library_is_named(tiny, monkeypatch):
    monkeypatch.setattr(grammar, "llguidance", None)
    with pytest.raises(ClientError, match="pip install llguidance"):
        Grammar.compile("{}", tiny, vocabulary=VOCABULARY)


@pytest.mark.model
def test_the_real_vocabulary_keeps_the_schema(smollm2):
    tokenizer = ModelTokenizer(smollm2)
    text, one = write(tokenizer, SCHEMA, 5, vocabulary=49152)
    assert one.is_complete
    assert json.loads(text).keys() == {"count", "names"}
    assert text.startswith('{"count": ')


def test_a_schema_that_nothing_satisfies_is_the_clients_to_mend(tiny):
    with pytest.raises(ClientError, match="cannot be used") as refusal:
        Grammar.compile('{"$ref": "#"}', tiny, vocabulary=VOCABULARY)
    assert refusal.value.param == "response_format"
