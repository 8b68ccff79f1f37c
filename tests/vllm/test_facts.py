"""Whoever may not share a block does not find it: all that decides its bytes is part of its namespace."""

from __future__ import annotations

import msgspec
import pytest
from small import FACTS

from workmem.engines.vllm.facts import EngineFacts, Namespaces, Scope
from workmem.store.store import Store

OTHERS: dict[str, object] = {
    "version": "0.33",
    "dtype": "torch.bfloat16",
    "cache_dtype": "torch.int8",
    "order": "fake/amx",
    "quantization": "fp8",
    "rope": '{"factor": 2}',
    "block_tokens": 8,
    "layers": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "workers": 2,
    "hashing": "sha256_cbor:01",
}
WITHOUT = {"model", "layer_bytes", "hash_bytes"}
"""The folder of the weights stands for their digest, bytes follow from the shape, and hashes of another length are refused."""


def root(store: Store, facts: EngineFacts = FACTS, scope: Scope | None = None, weights: str = "w") -> bytes:
    return Namespaces(facts, weights, store).of(scope or Scope())[1][0]


@pytest.mark.parametrize("field", sorted(OTHERS))
def test_engines_that_differ_in_it_share_nothing(store: Store, field: str):
    assert OTHERS.keys() | WITHOUT == set(EngineFacts.__struct_fields__)
    other = msgspec.structs.replace(FACTS, **{field: OTHERS[field]})
    assert root(store, other) != root(store)


def test_nor_do_those_with_other_weights_tenants_adapters_or_epochs(store: Store):
    later = Namespaces(FACTS, "w", store)
    later.start_epoch(1)
    found = [
        root(store),
        root(store, weights="v"),
        root(store, scope=Scope(salt="a")),
        root(store, scope=Scope(adapter="a")),
        later.of(Scope())[1][0],
    ]
    assert len(set(found)) == len(found)


def test_the_folder_of_the_weights_is_no_part_of_it(store: Store):
    assert root(store, msgspec.structs.replace(FACTS, model="elsewhere")) == root(store)


def test_each_worker_has_a_part_of_its_own(store: Store):
    first, roots = Namespaces(msgspec.structs.replace(FACTS, workers=3), "w", store).of(Scope())
    assert roots == tuple(first.of_rank(rank).root() for rank in range(3))
    assert len(set(roots)) == 3


def test_what_is_packed_in_a_way_of_its_own_is_bytes():
    packed = msgspec.structs.replace(FACTS, layer_bytes=FACTS.layer_bytes + 2 * FACTS.block_tokens)
    assert packed.refusal() == ""
    assert packed.layout(0).dtype == "u8"
    assert packed.layout(0).layer_bytes == packed.layer_bytes
    assert FACTS.layout(0).dtype == "fp32"


@pytest.mark.parametrize(
    ("changes", "why"), [({"hash_bytes": 16}, "sha256_cbor"), ({"layer_bytes": 1001}, "do not divide")]
)
def test_what_cannot_be_kept_is_refused(changes, why):
    assert why in msgspec.structs.replace(FACTS, **changes).refusal()
