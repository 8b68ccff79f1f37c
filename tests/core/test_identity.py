"""Equal keys mean equal prefixes of equal namespaces, and nothing less."""

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from workmem.core.keys import block_key, block_keys
from workmem.core.layout import KVLayout, Namespace

LAYOUT = KVLayout(dtype="bf16", layers=2, kv_heads=2, head_dim=8, rope='{"rope_theta":10000.0}')
SPACE = Namespace(model_fingerprint="f" * 64, layout=LAYOUT)
OTHER = {"dtype": "fp32", "rope": "{}", "page_order": "KLNHD", "quantization": "int8"}

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def changed(struct: msgspec.Struct, field: str) -> msgspec.Struct:
    value = getattr(struct, field)
    another = OTHER.get(field, value + 1 if isinstance(value, int) else f"{value}x")
    return msgspec.structs.replace(struct, **{field: another})


def test_any_field_of_a_namespace_makes_another_root():
    spaces = [SPACE]
    spaces += [changed(SPACE, field) for field in Namespace.__struct_fields__ if field != "layout"]
    layouts = [changed(LAYOUT, field) for field in KVLayout.__struct_fields__]
    spaces += [msgspec.structs.replace(SPACE, layout=layout) for layout in layouts]
    assert len({space.root() for space in spaces}) == len(spaces) == 6 + len(KVLayout.__struct_fields__)


@given(tokens, tokens, st.integers(1, 32))
def test_chains_agree_exactly_as_far_as_tokens_do(first, second, block_tokens):
    root = SPACE.root()
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    keys, others = block_keys(root, first, block_tokens), block_keys(root, second, block_tokens)
    assert len(keys) == len(first) // block_tokens
    agreeing = sum(a == b for a, b in zip(keys, others, strict=False))
    assert agreeing == shared // block_tokens
    assert keys[:agreeing] == others[:agreeing]
    assert not set(keys[agreeing:]) & set(others[agreeing:])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=16), st.binary(min_size=1, max_size=16))
def test_an_extra_input_forks_the_chain(block, extra):
    root = SPACE.root()
    assert block_key(root, block) != block_key(root, block, extra)


def test_roots_do_not_depend_on_the_process():
    """A root is stored on disk: a change of the recipe must be deliberate, and raises its version."""
    assert SPACE.root().hex() == "e94ed81e70e651fb414aec5021cbb0d4e512dd2119e757fda865b2cca431dea8"


@given(
    st.integers(1, 64),
    st.integers(1, 16),
    st.sampled_from([32, 64, 80, 128]),
    st.sampled_from(["bf16", "fp32"]),
)
def test_slices_tile_a_page(layers, kv_heads, head_dim, dtype):
    layout = KVLayout(dtype=dtype, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    spans = [layout.slice_span(index) for index in range(layout.slice_count)]
    assert spans[0][0] == 0
    assert spans[-1][1] == layout.page_bytes
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    for layer in range(layers):
        start, end = spans[layout.slice_of_layer(layer)]
        assert start <= layer * layout.layer_bytes < end
