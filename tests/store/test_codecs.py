"""Codecs and sealing: what comes back is what went in, or an IntegrityError; never anything else."""

from __future__ import annotations

import os
import stat
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.core.errors import ConfigError, IntegrityError
from workmem.core.layout import KVLayout
from workmem.store.codecs import body, choose, floats, zstd
from workmem.store.codecs.choose import CODEC_NAMES, codec_by_id, codec_by_name, stored_layout
from workmem.store.codecs.contract import UnreadableError, restore, slice_checksums
from workmem.store.codecs.key_file import read_key
from workmem.store.codecs.sealing import Keyring, PageCipher, PagePlace, open_keyring
from workmem.store.codecs.xaes import TAG_BYTES, Xaes
from workmem.testing.pages import namespace

pytestmark = pytest.mark.timeout(120)

KEY = bytes(range(32))
TINY = KVLayout(dtype="bf16", layers=2, kv_heads=2, head_dim=8, block_tokens=4)
SMOL = KVLayout(dtype="bf16", layers=30, kv_heads=3, head_dim=64)
SLICED = KVLayout(dtype="fp32", layers=3, kv_heads=4, head_dim=128)

layouts = st.builds(
    KVLayout,
    dtype=st.sampled_from(["bf16", "fp32"]),
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8, 64, 80]),
    block_tokens=st.sampled_from([1, 4, 16]),
)
codec_names = st.sampled_from(CODEC_NAMES)


def gaussian(layout: KVLayout, seed: int = 0, scale: float = 1.0) -> bytes:
    """A page that looks like KV: channels of different sizes, noise in the mantissa."""
    rng = np.random.default_rng(seed)
    shape = (layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    spread = np.exp(rng.normal(size=(layout.layers, 2, 1, layout.kv_heads, layout.head_dim)))
    page = bytearray(layout.page_bytes)
    floats.save((rng.normal(size=shape) * spread * scale).astype(np.float32), memoryview(page), layout)
    return bytes(page)


def encoded(name: str, page: bytes, layout: KVLayout, key: bytes = KEY) -> bytes:
    """What the codec stores; pages of these tests are worth it."""
    made = codec_by_name(name, "$").encode(memoryview(page), key=key, layout=layout)
    assert made is not None
    return bytes(made)


def decoded(name: str, stored: bytes, layout: KVLayout, key: bytes = KEY) -> bytes:
    page = bytearray(layout.page_bytes)
    codec_by_name(name, "$").decode(memoryview(stored), memoryview(page), key=key, layout=layout)
    return bytes(page)


# Exact codecs


@settings(max_examples=150, deadline=None)
@given(
    layouts, st.sampled_from(["raw", "zstd"]), st.integers(0, 2**32), st.sampled_from([0.0, 1e-30, 1.0, 1e30])
)
def test_exact_codecs_give_back_every_bit(layout, name, seed, scale):
    page = gaussian(layout, seed, scale)
    codec = codec_by_name(name, "$")
    stored = codec.encode(memoryview(page), key=KEY, layout=layout)
    if stored is not None:
        assert len(stored) <= layout.page_bytes
        into = memoryview(bytearray(b"\xaa" * layout.page_bytes))
        sums = slice_checksums(memoryview(page), layout)
        assert restore(codec, memoryview(stored), into, key=KEY, layout=layout, checksums=sums) == sums
        assert into == page


@settings(max_examples=100, deadline=None)
@given(layouts, st.data())
def test_zstd_gives_back_pages_of_any_bits(layout, data):
    fill = data.draw(st.binary(min_size=1, max_size=200))
    page = (fill * (layout.page_bytes // len(fill) + 1))[: layout.page_bytes]
    stored = codec_by_name("zstd", "$").encode(memoryview(page), key=KEY, layout=layout)
    if stored is not None:
        assert decoded("zstd", bytes(stored), layout) == page


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(0, 2**32))
def test_planes_split_and_merge_are_inverse(layout, seed):
    page = np.random.default_rng(seed).bytes(layout.page_bytes)
    planes = zstd.split(memoryview(page), layout, zstd.scratch(layout))
    assert planes.shape[0] * planes.shape[1] == layout.page_bytes
    into = bytearray(layout.page_bytes)
    zstd.merge(list(planes), memoryview(into), layout)
    assert into == page


def test_first_plane_holds_the_low_bytes_of_k_before_those_of_v():
    page = bytearray(TINY.page_bytes)
    values = np.frombuffer(page, "<u2").reshape(TINY.layers, 2, -1)
    values[:, 0], values[:, 1] = 0x1122, 0x3344
    low, high = zstd.split(memoryview(page), TINY, zstd.scratch(TINY))
    half = low.size // 2
    assert set(low[:half]) == {0x22}
    assert set(low[half:]) == {0x44}
    assert set(high[:half]) == {0x11}


def test_zstd_makes_pages_of_kv_smaller_and_leaves_noise_raw():
    for layout, most in ((SMOL, 0.80), (SLICED, 0.92)):
        assert len(encoded("zstd", gaussian(layout), layout)) < layout.page_bytes * most
    noise = np.random.default_rng(1).bytes(SMOL.page_bytes)
    assert codec_by_name("zstd", "$").encode(memoryview(noise), key=KEY, layout=SMOL) is None


def test_raw_stores_the_payload_itself_without_a_copy():
    page = bytearray(gaussian(TINY))
    stored = codec_by_name("raw", "$").encode(memoryview(page), key=KEY, layout=TINY)
    page[0] ^= 1
    assert stored == page


def test_one_codec_serves_many_threads():
    pages = [gaussian(SMOL, seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        stored = list(pool.map(lambda page: encoded("zstd", page, SMOL), pages * 4))
        back = list(pool.map(lambda raw: decoded("zstd", raw, SMOL), stored))
    assert back == pages * 4


# Damage


def assert_refused(
    codec, stored: bytes, page: bytes, layout: KVLayout, sums: tuple[int, ...], key=KEY
) -> None:
    into = memoryview(bytearray(len(page)))
    with pytest.raises(IntegrityError):
        restore(codec, memoryview(stored), into, key=key, layout=layout, checksums=sums)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_every_flipped_bit_is_found(name):
    page = (
        gaussian(TINY)
        if name != "zstd"
        else bytes(TINY.page_bytes // 2) + gaussian(TINY)[: TINY.page_bytes // 2]
    )
    codec, stored = codec_by_name(name, "$"), bytearray(encoded(name, page, TINY))
    sums = slice_checksums(memoryview(page), TINY)
    restore(codec, memoryview(stored), memoryview(bytearray(len(page))), key=KEY, layout=TINY, checksums=sums)
    for bit in range(8 * len(stored)):
        stored[bit // 8] ^= 1 << bit % 8
        assert_refused(codec, bytes(stored), page, TINY, sums)
        if name != "raw":
            with pytest.raises(IntegrityError):
                codec.check(memoryview(stored), key=KEY, layout=TINY)
        stored[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_every_truncation_and_any_longer_page_is_found(name):
    page = bytes(TINY.page_bytes)
    codec, stored = codec_by_name(name, "$"), encoded(name, page, TINY)
    sums = slice_checksums(memoryview(page), TINY)
    codec.check(memoryview(stored), key=KEY, layout=TINY)
    for length in range(len(stored)):
        assert_refused(codec, stored[:length], page, TINY, sums)
        with pytest.raises(IntegrityError):
            codec.check(memoryview(stored)[:length], key=KEY, layout=TINY)
    for more in (b"\0", b"\xff", bytes(4096)):
        assert_refused(codec, stored + more, page, TINY, sums)


@pytest.mark.parametrize("name", ["zstd", "int8", "fp8"])
def test_bytes_of_another_block_or_layout_are_refused(name):
    page = gaussian(TINY, scale=0.0)
    codec, stored = codec_by_name(name, "$"), encoded(name, page, TINY)
    sums = slice_checksums(memoryview(page), TINY)
    assert_refused(codec, stored, page, TINY, sums, key=KEY[::-1])
    wider = msgspec.structs.replace(TINY, layers=3)
    assert_refused(codec, stored, bytes(wider.page_bytes), wider, sums)


@pytest.mark.parametrize("name", ["zstd", "int8", "fp8"])
@settings(max_examples=100, deadline=None)
@given(junk=st.binary(max_size=600))
def test_bytes_with_a_right_checksum_but_no_sense_are_refused(name, junk):
    stored = body.pack([junk], key=KEY)
    page = bytes(TINY.page_bytes)
    assert_refused(codec_by_name(name, "$"), stored, page, TINY, (0,) * TINY.slice_count)


def test_a_plane_that_states_a_huge_size_takes_no_memory():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    plane = TINY.page_bytes // 2
    stored = body.pack([struct.pack("<2I", plane | 1 << 31, len(bomb)), bytes(plane), bomb], key=KEY)
    with pytest.raises(IntegrityError, match=f"states {1 << 26} bytes"):
        decoded("zstd", stored, TINY)


def test_an_exact_page_that_decodes_to_other_bytes_is_refused():
    page = gaussian(TINY)
    other = slice_checksums(memoryview(gaussian(TINY, 1)), TINY)
    assert_refused(codec_by_name("raw", "$"), page, page, TINY, other)


# Approximate codecs


@settings(max_examples=80, deadline=None)
@given(layouts, st.integers(0, 2**32), st.sampled_from([1e-36, 1e-6, 1.0, 1e4, 1e33]))
def test_int8_errs_by_half_a_step_at_most(layout, seed, scale):
    page = gaussian(layout, seed, scale)
    before = floats.load(memoryview(page), layout).astype(np.float64)
    after = floats.load(memoryview(decoded("int8", encoded("int8", page, layout), layout)), layout)
    rounding = np.abs(before) * (2**-8 if layout.dtype == "bf16" else 2**-22)
    for kind, axis in ((0, 1), (1, 3)):
        step = np.abs(before[:, kind]).max(axis=axis, keepdims=True) / 127 * (1 + 2**-7)
        assert (np.abs(after[:, kind] - before[:, kind]) <= step * 0.5001 + rounding[:, kind] + 1e-40).all()


@settings(max_examples=80, deadline=None)
@given(layouts, st.integers(0, 2**32), st.sampled_from([1e-36, 1e-6, 1.0, 1e4, 1e33]))
def test_fp8_errs_by_a_sixteenth_or_its_smallest_step(layout, seed, scale):
    page = gaussian(layout, seed, scale)
    before = floats.load(memoryview(page), layout).astype(np.float64)
    after = floats.load(memoryview(decoded("fp8", encoded("fp8", page, layout), layout)), layout)
    unit = np.abs(before).max(axis=(2, 4), keepdims=True) / floats.E4M3_MAX
    allowed = np.maximum(np.abs(before) * 2**-4, unit * 2**-10) * 1.001
    rounding = np.abs(before) * (2**-7 if layout.dtype == "bf16" else 2**-22)
    assert (np.abs(after - before) <= allowed + rounding + 1e-40).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_approximate_pages_are_about_half_and_their_checksums_are_their_own(name):
    page = gaussian(SMOL)
    codec, stored = codec_by_name(name, "$"), encoded(name, page, SMOL)
    assert 0.5 * SMOL.page_bytes < len(stored) < 0.55 * SMOL.page_bytes
    sums = slice_checksums(memoryview(page), SMOL)
    into = memoryview(bytearray(len(page)))
    found = restore(codec, memoryview(stored), into, key=KEY, layout=SMOL, checksums=sums)
    assert found == slice_checksums(into, SMOL) != sums


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("layout", [TINY, SLICED], ids=["bf16", "fp32"])
def test_pages_with_values_that_no_scale_fits_are_stored_raw(name, bad, layout):
    page = bytearray(layout.page_bytes)
    values = floats.load(memoryview(page), layout).copy()
    values[1, 1, 2, 1, 3] = bad
    if layout.dtype == "fp32":
        np.frombuffer(page, "<f4")[:] = values.reshape(-1)
    else:
        np.frombuffer(page, "<u2")[:] = values.reshape(-1).view(np.uint32) >> 16
    assert codec_by_name(name, "$").encode(memoryview(page), key=KEY, layout=layout) is None


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_zeros_come_back_as_zeros_beside_a_dead_channel(name):
    page = bytearray(TINY.page_bytes)
    values = np.zeros((2, 2, 4, 2, 8), np.float32)
    values[0, 0, 1, 0, 5] = -3.5
    floats.save(values, memoryview(page), TINY)
    after = floats.load(memoryview(decoded(name, encoded(name, bytes(page), TINY), TINY)), TINY)
    assert after[0, 0, 1, 0, 5] == pytest.approx(-3.5, rel=0.01)
    assert np.count_nonzero(after) == 1


def test_e4m3_is_the_format_its_standard_describes():
    values = floats.e4m3_values()
    known = {
        0x00: 0.0,
        0x01: 2**-9,
        0x07: 7 * 2**-9,
        0x08: 2**-6,
        0x38: 1.0,
        0x3C: 1.5,
        0x7E: 448.0,
        0xB8: -1.0,
    }
    assert {code: float(values[code]) for code in known} == known
    assert np.isnan(values[[0x7F, 0xFF]]).all()
    assert np.isfinite(np.delete(values, [0x7F, 0xFF])).all()


def test_every_e4m3_value_keeps_its_code_and_ties_go_to_even():
    finite = np.delete(np.arange(256), [0x7F, 0xFF])
    assert (floats.to_e4m3(floats.e4m3_values()[finite]) == finite).all()
    ties = np.array([1 + 1 / 16, 1 + 3 / 16, 2**-10, 3 * 2**-10, -(1 + 1 / 16), 1000.0], np.float32)
    assert floats.to_e4m3(ties).tolist() == [0x38, 0x3A, 0x00, 0x02, 0xB8, 0x7E]
    assert floats.to_e4m3(np.nextafter(ties, np.float32(1e9)))[:4].tolist() == [0x39, 0x3A, 0x01, 0x02]
    assert floats.to_e4m3(np.nextafter(ties, np.float32(0)))[:4].tolist() == [0x38, 0x39, 0x00, 0x01]


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, min_value=0, max_value=float(np.float32(1e38))))
def test_bf16_scales_are_rounded_up_by_one_step_at_most(value):
    exact = np.array([value], np.float32)
    found = floats.bf16_at_least(exact)
    assert found[0] >= exact[0]
    assert found.view(np.uint32)[0] & 0xFFFF == 0
    assert found.view(np.uint32)[0] - exact.view(np.uint32)[0] < 1 << 16


# Choice and identity


def test_codecs_are_found_by_name_and_by_number():
    codecs = [codec_by_name(name, "$") for name in CODEC_NAMES]
    assert [codec.name for codec in codecs] == list(CODEC_NAMES)
    assert {codec.name: codec.id for codec in codecs} == {"raw": 0, "zstd": 1, "int8": 2, "fp8": 3}
    assert [codec_by_id(codec.id).name for codec in codecs] == list(CODEC_NAMES)


def test_unknown_codecs_are_a_config_error_by_name_and_a_miss_by_number():
    with pytest.raises(
        ConfigError, match=r"^\$\.store\.ssd\.codec: 'lz4' is no codec; choose one of raw, zstd"
    ):
        codec_by_name("lz4", "$.store.ssd.codec")
    with pytest.raises(UnreadableError, match="codec 200"):
        codec_by_id(200)


@pytest.fixture
def _without_zstandard(monkeypatch):
    choose._zstd.cache_clear()
    monkeypatch.delitem(sys.modules, "workmem.store.codecs.zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    yield
    choose._zstd.cache_clear()


@pytest.mark.usefixtures("_without_zstandard")
def test_a_missing_zstd_package_says_what_to_install():
    with pytest.raises(ConfigError, match=r"^\$\.c: .*pip install zstandard"):
        codec_by_name("zstd", "$.c")
    with pytest.raises(UnreadableError, match="zstandard is not installed"):
        codec_by_id(choose.ZSTD_ID)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_only_exact_codecs_share_an_identity(name):
    codec, plain = codec_by_name(name, "$"), namespace(layout=SMOL)
    kept = msgspec.structs.replace(plain, layout=stored_layout(SMOL, codec))
    assert (kept.root() == plain.root()) is codec.exact
    assert kept.layout.page_bytes == SMOL.page_bytes


def test_each_approximate_codec_has_an_identity_of_its_own():
    quantized = msgspec.structs.replace(SMOL, quantization="fp8")
    seen = [
        stored_layout(of, codec_by_name(name, "$")) for of in (SMOL, quantized) for name in ("int8", "fp8")
    ]
    assert [layout.quantization for layout in seen] == [
        "stored-int8",
        "stored-fp8",
        "fp8+stored-int8",
        "fp8+stored-fp8",
    ]
    with pytest.raises(ConfigError, match="order LKNHD"):
        stored_layout(msgspec.structs.replace(SMOL, page_order="LKHND"), codec_by_name("int8", "$"))


# Sealing

PLACE = PagePlace(
    root=b"r" * 32, key=KEY, parent=b"p" * 32, depth=7, payload_bytes=4096, stored_bytes=100, codec=1
)
SECRET = b"sixteen token ids of a prompt"
STORED = bytes(range(100))
CIPHER = PageCipher(b"k" * 16 + KEY[:16])


def sealed(place: PagePlace = PLACE, stored: bytes = STORED, secret: bytes = SECRET):
    into = bytearray(len(stored))
    return CIPHER.seal(place, secret, memoryview(stored), memoryview(into)), bytes(into)


def opened(place: PagePlace, seal, hidden: bytes, cipher: PageCipher = CIPHER) -> bytes:
    into = bytearray(len(hidden))
    cipher.open_payload(place, seal, memoryview(hidden), memoryview(into))
    return bytes(into)


def test_xaes_meets_its_published_vectors():
    nonce, plain = b"ABCDEFGHIJKLMNOPQRSTUVWX", b"XAES-256-GCM"
    for byte, bound, expected in (
        (b"\x01", b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (b"\x03", b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
    ):
        into = bytearray(len(plain))
        tag = Xaes(byte * 32).encrypt(nonce, plain, bound, memoryview(into))
        assert (into + tag).hex() == expected


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=5000), st.binary(max_size=300))
def test_sealed_pages_open_at_their_place(stored, secret):
    place = msgspec.structs.replace(PLACE, stored_bytes=len(stored))
    seal, hidden = sealed(place, stored, secret)
    assert opened(place, seal, hidden) == stored
    assert CIPHER.open_secret(place, seal) == secret
    assert len(seal.secret) == len(secret) + TAG_BYTES


def test_nothing_of_prompt_or_page_shows_and_no_two_seals_are_alike():
    (one, hidden), (other, again) = sealed(), sealed()
    assert one.nonce != other.nonce
    assert hidden != again
    assert one.secret != other.secret
    for secret in (SECRET, STORED):
        for at in range(len(secret) - 4):
            assert secret[at : at + 4] not in hidden + one.secret


def test_every_flipped_bit_of_a_sealed_page_is_found_and_shows_nothing():
    seal, hidden = sealed()
    for bit in range(8 * len(hidden)):
        damaged, into = bytearray(hidden), bytearray(b"\xaa" * len(hidden))
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError, match="do not open"):
            CIPHER.open_payload(PLACE, seal, memoryview(damaged), memoryview(into))
        assert not any(into)


@pytest.mark.parametrize("field", ["nonce", "tag", "secret", "key_id"])
def test_every_flipped_bit_of_a_seal_is_found(field):
    seal, hidden = sealed()
    for bit in range(8 * len(getattr(seal, field))):
        damaged = bytearray(getattr(seal, field))
        damaged[bit // 8] ^= 1 << bit % 8
        wrong = msgspec.structs.replace(seal, **{field: bytes(damaged)})
        if field != "secret":
            with pytest.raises(IntegrityError):
                opened(PLACE, wrong, hidden)
        if field != "tag":
            with pytest.raises(IntegrityError):
                CIPHER.open_secret(PLACE, wrong)


def test_every_truncation_of_a_sealed_page_is_found():
    seal, hidden = sealed()
    for length in range(len(hidden)):
        for place in (PLACE, msgspec.structs.replace(PLACE, stored_bytes=length)):
            with pytest.raises(IntegrityError):
                opened(place, seal, hidden[:length])
    for length in range(len(seal.secret)):
        with pytest.raises(IntegrityError):
            CIPHER.open_secret(PLACE, msgspec.structs.replace(seal, secret=seal.secret[:length]))
    for wrong in (seal.nonce[:-1], b"", seal.nonce + b"\0"):
        with pytest.raises(IntegrityError):
            opened(PLACE, msgspec.structs.replace(seal, nonce=wrong), hidden)
    for wrong in (seal.tag[:-1], seal.tag[:4], b"", seal.tag + b"\0"):
        with pytest.raises(IntegrityError):
            opened(PLACE, msgspec.structs.replace(seal, tag=wrong), hidden)


@pytest.mark.parametrize(
    "change",
    [
        {"root": b"s" * 32},
        {"key": KEY[::-1]},
        {"parent": b"q" * 32},
        {"depth": 8},
        {"payload_bytes": 8192},
        {"codec": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_sealed_page_moved_to_another_place_does_not_open(change):
    seal, hidden = sealed()
    elsewhere = msgspec.structs.replace(PLACE, **change)
    with pytest.raises(IntegrityError, match="do not open"):
        opened(elsewhere, seal, hidden)
    with pytest.raises(IntegrityError, match="do not open"):
        CIPHER.open_secret(elsewhere, seal)


def test_a_payload_does_not_open_as_a_header_nor_the_other_way_round():
    seal, hidden = sealed(stored=STORED, secret=STORED)
    with pytest.raises(IntegrityError):
        CIPHER.open_secret(PLACE, msgspec.structs.replace(seal, secret=hidden + seal.tag))
    with pytest.raises(IntegrityError):
        opened(PLACE, msgspec.structs.replace(seal, tag=seal.secret[-TAG_BYTES:]), seal.secret[:-TAG_BYTES])


def test_another_key_is_a_miss_that_names_both_keys_and_no_sign_of_damage():
    seal, hidden = sealed()
    other = PageCipher(KEY)
    for attempt in (lambda: opened(PLACE, seal, hidden, other), lambda: other.open_secret(PLACE, seal)):
        with pytest.raises(UnreadableError, match=f"{seal.key_id.hex()}, this is key {other.key_id.hex()}"):
            attempt()
    forged = msgspec.structs.replace(seal, key_id=other.key_id)
    with pytest.raises(IntegrityError, match="do not open"):
        opened(PLACE, forged, hidden, other)


def test_old_keys_open_and_the_current_one_seals():
    seal, hidden = sealed()
    ring = Keyring(PageCipher(KEY), [CIPHER])
    assert ring.current.key_id != seal.key_id
    assert opened(PLACE, seal, hidden, ring.cipher(seal.key_id)) == STORED
    with pytest.raises(UnreadableError, match="no key file is configured"):
        Keyring(PageCipher(KEY)).cipher(seal.key_id)


def test_key_id_is_stable_and_is_no_part_of_the_key():
    assert PageCipher(KEY).key_id == PageCipher(KEY).key_id
    assert PageCipher(KEY).key_id.hex() == "7b29f339d31e2a1b"
    assert PageCipher(KEY).key_id not in KEY


def test_journal_batches_open_in_their_own_turn_only():
    hidden = CIPHER.seal_batch(b"store 1", b"puts and deletes")
    assert b"puts" not in hidden
    assert len(hidden) == len(b"puts and deletes") + 48
    assert CIPHER.open_batch(b"store 1", hidden) == b"puts and deletes"
    with pytest.raises(IntegrityError, match="do not open"):
        CIPHER.open_batch(b"store 2", hidden)
    with pytest.raises(UnreadableError):
        PageCipher(KEY).open_batch(b"store 1", hidden)
    for length in range(len(hidden)):
        with pytest.raises(IntegrityError):
            CIPHER.open_batch(b"store 1", hidden[:length])
    for bit in range(8 * len(hidden)):
        damaged = bytearray(hidden)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            CIPHER.open_batch(b"store 1", bytes(damaged))


def test_ciphers_serve_many_threads():
    def turn(index: int) -> bool:
        stored = bytes([index]) * 50_000
        place = msgspec.structs.replace(PLACE, depth=index, stored_bytes=len(stored))
        return opened(place, *sealed(place, stored)) == stored

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(turn, range(64)))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_compression_then_sealing_round_trips(name):
    page = gaussian(SMOL, scale=1.0)
    codec, stored = codec_by_name(name, "$"), encoded(name, page, SMOL)
    place = msgspec.structs.replace(
        PLACE, payload_bytes=SMOL.page_bytes, stored_bytes=len(stored), codec=codec.id
    )
    back = opened(place, *sealed(place, stored))
    assert back == stored
    assert decoded(name, back, SMOL) == decoded(name, stored, SMOL)


# Key files


def key_file(tmp_path, content: bytes, mode: int = 0o600):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


RANDOM = bytes((7 * index + 3) % 256 for index in range(32))


@pytest.mark.parametrize("mode", [0o600, 0o400])
@pytest.mark.parametrize(
    "content",
    [RANDOM, RANDOM.hex().encode(), RANDOM.hex().upper().encode() + b"\n", RANDOM.hex().encode() + b"\r\n"],
)
def test_key_files_hold_raw_bytes_or_hex(tmp_path, content, mode):
    assert read_key(key_file(tmp_path, content, mode), "$") == RANDOM


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_key_files_that_others_can_reach_are_refused(tmp_path, mode):
    path = key_file(tmp_path, RANDOM, mode)
    with pytest.raises(ConfigError, match=rf"^\$\.k: .*mode {mode:04o}.*chmod 600"):
        read_key(path, "$.k")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes"),
        (RANDOM[:31], "31 bytes"),
        (RANDOM + b"\n", "33 bytes"),
        (RANDOM.hex().encode()[:-1], "63 bytes"),
        (RANDOM.hex().encode() + b"\n\n", "66 bytes"),
        (b"g" * 64, "64 bytes"),
        (bytes(5000), "more than 66 bytes"),
        (bytes(32), "hardly any different bytes"),
        (b"00" * 32, "hardly any different bytes"),
        (b"correct horse battery staple 123", "passphrase"),
    ],
)
def test_key_files_that_hold_no_key_are_refused(tmp_path, content, says):
    with pytest.raises(ConfigError, match=rf"^\$\.k: key file .*{says}.*openssl rand") as refused:
        read_key(key_file(tmp_path, content), "$.k")
    assert not content or content.decode("latin-1") not in str(refused.value)


def test_key_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^\$\.k: there is no key file .*openssl rand"):
        read_key(tmp_path / "absent", "$.k")
    with pytest.raises(ConfigError, match="not a plain file"):
        read_key(tmp_path, "$.k")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a plain file"):
        read_key(tmp_path / "pipe", "$.k")


@pytest.mark.parametrize("owner", ["stranger", "root", "own"])
def test_key_files_belong_to_their_reader_or_to_root(tmp_path, monkeypatch, owner):
    path = key_file(tmp_path, RANDOM)
    fields = list(path.stat())
    fields[stat.ST_UID] = {"stranger": os.geteuid() + 1, "root": 0, "own": os.geteuid()}[owner]
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result(fields))
    if owner == "stranger":
        with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid() + 1}"):
            read_key(path, "$.k")
    else:
        assert read_key(path, "$.k") == RANDOM


def test_keyrings_are_read_from_files(tmp_path):
    current, older = tmp_path / "new", tmp_path / "old"
    for path, content in ((current, RANDOM), (older, RANDOM[::-1])):
        path.write_bytes(content)
        path.chmod(0o600)
    ring = open_keyring(current, [older], path="$.store.ssd.key_file")
    assert ring.current.key_id == PageCipher(RANDOM).key_id
    assert ring.cipher(PageCipher(RANDOM[::-1]).key_id)
    with pytest.raises(ConfigError, match=r"^\$\.store\.ssd\.key_file \(older key 0\): there is no key file"):
        open_keyring(current, [tmp_path / "absent"], path="$.store.ssd.key_file")


def test_a_missing_cryptography_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "workmem.store.codecs.xaes")
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ConfigError, match=r"^\$\.k: .*pip install cryptography"):
        open_keyring(key_file(tmp_path, RANDOM), path="$.k")
