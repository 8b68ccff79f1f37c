"""Block hashes as vLLM computes them; engine_tests holds them against vLLM itself."""

from __future__ import annotations

import hashlib

import pytest

from workmem.engines.vllm.hashes import block_hashes, encode, event_hash


@pytest.mark.parametrize(
    ("value", "wanted"),
    # From appendix A of RFC 8949.
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (100, "1864"),
        (1000, "1903e8"),
        (1000000, "1a000f4240"),
        (1000000000000, "1b000000e8d4a51000"),
        (18446744073709551615, "1bffffffffffffffff"),
        (-1, "20"),
        (-1000, "3903e7"),
        (None, "f6"),
        (b"\x01\x02\x03\x04", "4401020304"),
        ("IETF", "6449455446"),
        ("\u6c34", "63e6b0b4"),
        ([], "80"),
        ([1, [2, 3], [4, 5]], "8301820203820405"),
        (list(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
    ],
)
def test_encoding_is_that_of_the_standard(value, wanted):
    assert encode(value).hex() == wanted


def test_a_chain_names_all_before_it():
    tokens = list(range(70000, 70010))
    root = hashlib.sha256(encode("vllm-none-hash")).digest()
    first = hashlib.sha256(encode((root, tokens[:4], None))).digest()
    second = hashlib.sha256(encode((first, tokens[4:8], None))).digest()
    assert block_hashes(tokens, 4) == [first, second]
    assert event_hash(first) == int.from_bytes(first, "big") & (2**64 - 1)


def test_the_salt_enters_the_first_block_and_the_adapter_each():
    tokens = list(range(8))
    root = hashlib.sha256(encode("7")).digest()
    lora = ("lora", "sql", "/adapters/sql")
    first = hashlib.sha256(encode((root, tokens[:4], (lora, ("cache_salt", "t"))))).digest()
    second = hashlib.sha256(encode((first, tokens[4:], (lora,)))).digest()
    assert block_hashes(tokens, 4, salt="t", adapter=lora[1:], seed="7") == [first, second]


def test_nothing_shorter_than_a_block_has_a_hash():
    assert block_hashes([1, 2, 3], 4) == []
    assert block_hashes([], 4) == []
