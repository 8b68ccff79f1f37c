"""Pages on ssd that are compressed, rounded or sealed: a hit is as good as one kept as it is, or it is none."""

from __future__ import annotations

import hashlib
import json
import secrets

import msgspec
import numpy as np
import pytest

from workmem.app import open_host
from workmem.core.errors import ConfigError
from workmem.core.events import BlockQuarantined, discard
from workmem.core.layout import KVLayout, Namespace
from workmem.core.outcomes import MissReason
from workmem.store.codecs.choose import codec_by_name, stored_layout
from workmem.store.codecs.key_file import KEY_BYTES
from workmem.store.codecs.raw import Raw
from workmem.store.codecs.sealing import open_keyring
from workmem.store.config import SsdConfig, StoreConfig
from workmem.store.contract import PageWrite
from workmem.store.tiers.page_check import Expected
from workmem.store.tiers.page_forms import PageForms
from workmem.store.tiers.page_header import PageHeader, header_bytes, pack
from workmem.store.tools.folder_view import read_folder
from workmem.store.tools.gc import collect
from workmem.store.tools.pages import PageReader
from workmem.store.tools.stat import stat_of
from workmem.store.tools.verify import verify
from workmem.testing.pages import SLICED, SMALL, Chain, namespace, page_bytes, read_all, settle

pytestmark = pytest.mark.timeout(120)

FORMS = ["zstd", "sealed", "sealed zstd"]


def key_file(folder, name="key"):
    file = folder / name
    if not file.exists():
        file.write_text(secrets.token_hex(KEY_BYTES))
        file.chmod(0o600)
    return str(file)


@pytest.fixture
def form(request, tmp_path):
    """Settings of `[store.ssd]` by the words of a form."""
    words = request.param.split()
    settings = {"compression": "zstd"} if "zstd" in words else {}
    return settings | ({"key_file": key_file(tmp_path)} if "sealed" in words else {})


def keys_of(form):
    return open_keyring(form["key_file"], path="$") if "key_file" in form else None


def segments(kit) -> bytes:
    return b"".join(file.read_bytes() for file in sorted((kit.folder / "segments").iterdir()))


def floats_of(chain, index) -> np.ndarray:
    """A page that looks like KV and follows from its key."""
    seed = int.from_bytes(hashlib.sha256(chain.keys[index]).digest()[:8], "little")
    count = chain.space.layout.page_bytes // 4
    return np.random.default_rng(seed).normal(size=count).astype("<f4")


def save_floats(store, chain) -> bytes:
    root = store.register(chain.space)
    writes = [
        PageWrite(
            chain.block(index),
            lambda view, i=index: view.__setitem__(slice(None), floats_of(chain, i).tobytes()),
            lambda _: None,
        )
        for index in range(len(chain.keys))
    ]
    store.save(root, writes)
    assert store.flush(20)
    return root


# Exact forms


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("layout", [SMALL, SLICED], ids=["small", "sliced"])
def test_what_comes_back_is_what_was_saved_now_and_after_a_restart(kit, form, layout):
    store = kit.open(dram="1MiB", ssd="32MiB", **form)
    chains = [Chain(namespace(layout=layout), 3, seed=seed) for seed in range(12)]
    for chain in chains:
        chain.save(store)
    for chain in chains:
        assert read_all(store, chain.root, chain.keys) == 3
    store.close()
    again = kit.open(dram="1MiB", ssd="32MiB", **form)
    for chain in chains:
        again.register(chain.space)
        assert read_all(again, chain.root, chain.keys) == 3
    assert kit.of(BlockQuarantined) == []


def test_compressed_pages_take_less_room_and_the_room_is_counted_as_it_is(kit):
    store = kit.open(ssd="32MiB", dram="2MiB", compression="zstd")
    chain = Chain(namespace(layout=SLICED), 8)
    chain.save(store)
    gauges = store.gauges()
    plain = 8 * (4096 + SLICED.page_bytes)
    assert gauges["store_ssd_plain_bytes_total"] == plain
    assert gauges["store_ssd_written_bytes_total"] == gauges["store_ssd_live_bytes"] < plain / 4
    assert gauges["store_ssd_used_bytes"] == len(segments(kit)) == gauges["store_ssd_live_bytes"] + 4096
    assert gauges["store_ssd_approximate"] == 0


def test_a_page_that_does_not_shrink_is_kept_as_it_is(kit):
    noise = secrets.token_bytes(SLICED.page_bytes)
    store = kit.open(ssd="32MiB", compression="zstd")
    chain = Chain(namespace(layout=SLICED), 1)
    root = store.register(chain.space)
    write = PageWrite(chain.block(0), lambda view: view.__setitem__(slice(None), noise), lambda _: None)
    store.save(root, [write])
    assert store.flush(20)
    assert store.gauges()["store_ssd_written_bytes_total"] == 4096 + SLICED.page_bytes
    assert noise in segments(kit)
    store.close()
    again = kit.open(ssd="32MiB", compression="zstd")
    again.register(chain.space)
    with_lease = again.lease(root, chain.keys, owner="t", ttl_s=20)
    settle(with_lease)
    assert bytes(with_lease.page(0)) == noise
    with_lease.release()


def test_compression_may_be_turned_on_and_off_over_the_same_pages(kit):
    chains = [Chain(namespace(layout=SLICED), 2, seed=seed) for seed in range(3)]
    for chain, compression in zip(chains, ["off", "zstd", "off"], strict=True):
        store = kit.open(ssd="32MiB", compression=compression)
        chain.save(store)
        for other in chains[: chains.index(chain) + 1]:
            store.register(other.space)
            assert read_all(store, other.root, other.keys) == 2
        store.close()


@pytest.mark.parametrize("form", FORMS, indirect=True)
def test_compaction_moves_them_and_the_tools_read_them(kit, form, tmp_path):
    store = kit.open(ssd="32MiB", dram="2MiB", **form)
    mine, other = (Chain(namespace(name, SLICED), 6) for name in ("mine", "other"))
    for index in range(6):
        for chain in (mine, other):
            store.register(chain.space)
            store.save(chain.root, chain.writes(indices=[index]))
            assert store.flush(20)
    # What lies beside a purged page is written again.
    store.purge(lambda space: space.model_fingerprint == "other")
    assert store.flush(20)
    assert store.gauges()["store_ssd_moved_bytes_total"] > 0
    assert read_all(store, mine.root, mine.keys) == 6
    store.close()
    view = read_folder(kit.folder, keyring=keys_of(form))
    verdict = verify(view)
    assert (verdict.pages, verdict.damage) == (6, [])
    assert collect(kit.folder, keyring=keys_of(form)).damaged == 0
    view = read_folder(kit.folder, keyring=keys_of(form))
    (space,) = (space for space in view.spaces if space.pages)
    with PageReader(view) as reader:
        header, payload = reader.page(space, space.pages[mine.keys[3]])
    assert header.tokens == mine.block(3).tokens
    assert hashlib.sha256(payload).digest() == hashlib.sha256(_plain(mine, 3)).digest()
    again = kit.open(ssd="32MiB", dram="2MiB", **form)
    again.register(mine.space)
    assert read_all(again, mine.root, mine.keys) == 6


def _plain(chain, index):
    return page_bytes(chain.keys[index], chain.space.layout)


@pytest.mark.parametrize("form", FORMS, indirect=True)
def test_a_flipped_bit_anywhere_in_a_page_is_a_miss(kit, form):
    store = kit.open(ssd="16MiB", **form)
    chain = Chain(namespace(layout=SMALL), 4)
    chain.save(store)
    page = int(store.gauges()["store_ssd_live_bytes"]) // 4
    store.close()
    (file,) = (kit.folder / "segments").iterdir()
    raw = bytearray(file.read_bytes())
    raw[4096 + 2 * page + 40] ^= 1
    raw[4096 + 3 * page + page - 4096 + 30] ^= 1
    file.write_bytes(raw)
    assert len(verify(read_folder(kit.folder, keyring=keys_of(form))).damage) == 2
    again = kit.open(ssd="16MiB", **form)
    again.register(chain.space)
    lease = again.lease(chain.root, chain.keys, owner="t", ttl_s=20)
    settle(lease)
    assert lease.ready == 2
    assert lease.failed is MissReason.CORRUPT
    lease.release()


# Sealed


def test_nothing_of_a_prompt_or_a_tenant_lies_on_a_sealed_disk(kit, tmp_path):
    sealed = {"key_file": key_file(tmp_path)}
    space = Namespace(model_fingerprint="the-model", layout=SMALL, tenant_salt="the-salt-of-a-tenant")
    chain = Chain(space, 4)
    store = kit.open(**sealed)
    chain.save(store)
    store.close()
    found = segments(kit) + (kit.folder / "journal").read_bytes()
    tokens = np.array(chain.block(1).tokens, "<u4").tobytes()
    secret = [b"the-salt-of-a-tenant", b"the-model", chain.root, chain.keys[1], tokens, _plain(chain, 1)[:32]]
    for part in secret:
        assert part not in found
    # The same in the clear, so that the search is known to find it.
    plain = kit.open(path=tmp_path / "plain")
    chain.save(plain)
    plain.close()
    found = b"".join(f.read_bytes() for f in (tmp_path / "plain").rglob("*") if f.is_file())
    assert all(part in found for part in secret)


def test_every_page_and_every_batch_has_a_nonce_of_its_own(kit, tmp_path):
    store = kit.open(key_file=key_file(tmp_path))
    chain = Chain(namespace(), 8)
    chain.save(store)
    store.close()
    raw, page = segments(kit), 8192
    nonces = {raw[at + 24 : at + 48] for at in range(4096, len(raw), page)}
    assert len(nonces) == 8


def test_without_its_key_a_sealed_folder_stops_the_start(kit, tmp_path):
    store = kit.open(key_file=key_file(tmp_path))
    chain = Chain(namespace(), 2)
    chain.save(store)
    store.close()
    with pytest.raises(ConfigError, match=r"\$\.store\.ssd\.key_file: is empty, and .* is sealed under key"):
        kit.open()
    with pytest.raises(ConfigError, match=r"\$\.store\.ssd\.key_file: .*sealed under key .*older_key_files"):
        kit.open(key_file=key_file(tmp_path, "another"))
    with pytest.raises(ConfigError, match=r"\$\.store\.ssd\.key_file: there is no key file"):
        kit.open(key_file=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="sealed under key"):
        read_folder(kit.folder)
    again = kit.open(key_file=key_file(tmp_path))
    again.register(chain.space)
    assert read_all(again, chain.root, chain.keys) == 2


def test_a_key_comes_too_late_for_a_folder_in_the_clear(kit, tmp_path):
    store = kit.open()
    Chain(namespace(), 2).save(store)
    store.close()
    with pytest.raises(ConfigError, match=r"\$\.store\.ssd\.key_file: .* in the clear"):
        kit.open(key_file=key_file(tmp_path))


def test_older_keys_without_a_current_one_are_refused(kit, tmp_path):
    with pytest.raises(ConfigError, match=r"\$\.store\.ssd\.older_key_files"):
        kit.open(older_key_files=(key_file(tmp_path),))


def test_a_new_key_opens_old_pages_while_the_old_one_is_named_and_then_they_are_misses(kit, tmp_path):
    old, new = key_file(tmp_path, "old"), key_file(tmp_path, "new")
    before, after = Chain(namespace(), 3, seed=1), Chain(namespace(), 3, seed=2)
    store = kit.open(key_file=old)
    before.save(store)
    store.close()
    store = kit.open(key_file=new, older_key_files=(old,))
    after.save(store)
    assert read_all(store, before.root, before.keys) == 3
    store.close()
    store = kit.open(key_file=new)
    store.register(before.space)
    assert read_all(store, after.root, after.keys) == 3
    assert store.lookup(before.root, before.keys).blocks == 3
    lease = store.lease(before.root, before.keys, owner="t", ttl_s=20)
    settle(lease)
    assert (lease.ready, lease.failed) == (0, MissReason.UNAVAILABLE)
    lease.release()
    # Not promised again, no sign of a bad disk, and free to be saved anew.
    assert store.lookup(before.root, before.keys).blocks == 0
    gauges = store.gauges()
    assert gauges["store_ssd_unreadable_total"] >= 1
    assert gauges["store_quarantines_total"] == gauges["store_ssd_read_errors_total"] == 0
    before.save(store)
    assert read_all(store, before.root, before.keys) == 3
    assert store.purge(lambda _: True).blocks == 6
    assert store.flush(20)
    assert store.gauges()["store_ssd_pages"] == 0


def test_a_sealed_page_in_another_ones_place_does_not_open(kit, tmp_path):
    sealed = {"key_file": key_file(tmp_path)}
    store = kit.open(**sealed)
    chain = Chain(namespace(), 4)
    chain.save(store)
    store.close()
    (file,) = (kit.folder / "segments").iterdir()
    raw = bytearray(file.read_bytes())
    raw[4096 + 8192 : 4096 + 2 * 8192], raw[4096 + 2 * 8192 : 4096 + 3 * 8192] = (
        raw[4096 + 2 * 8192 : 4096 + 3 * 8192],
        raw[4096 + 8192 : 4096 + 2 * 8192],
    )
    file.write_bytes(raw)
    again = kit.open(**sealed)
    again.register(chain.space)
    assert read_all(again, chain.root, chain.keys) == 1


def test_a_sealed_folder_has_a_format_that_older_programs_refuse(kit, tmp_path):
    kit.open(key_file=key_file(tmp_path)).close()
    assert json.loads((kit.folder / "FORMAT").read_bytes())["format"] == 3


# Rounded


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rounding_has_to_be_asked_for_twice(kit, name):
    with pytest.raises(ConfigError, match=r"\$\.store\.ssd\.compression: .*store\.ssd\.approximate"):
        kit.open(compression=name)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_rounded_page_is_no_hit_for_an_exact_store(kit, name):
    chain = Chain(namespace(layout=SLICED), 3)
    rounded = kit.open(ssd="32MiB", compression=name, approximate=True)
    root = save_floats(rounded, chain)
    assert root != chain.root
    assert rounded.gauges()["store_ssd_approximate"] == 1
    assert rounded.gauges()["store_ssd_written_bytes_total"] < 3 * SLICED.page_bytes * 0.4
    keys = Chain(chain.space, 3).keys
    rounded.close()
    again = kit.open(ssd="32MiB", compression=name, approximate=True)
    assert again.register(chain.space) == root
    lease = again.lease(root, keys, owner="t", ttl_s=20)
    settle(lease)
    assert lease.ready == 3
    found = np.frombuffer(lease.page(1), "<f4")
    assert not np.array_equal(found, floats_of(chain, 1))
    assert np.abs(found - floats_of(chain, 1)).max() < 0.2
    lease.release()
    again.close()
    exact = kit.open(ssd="32MiB")
    exact.register(chain.space)
    assert exact.lookup(chain.root, keys).blocks == 0
    (space,) = stat_of(read_folder(kit.folder), show_names=True).spaces[:1]
    assert space.approximate
    assert f"stored-{name}" in space.layout


def test_a_promise_to_the_bit_refuses_a_store_that_rounds(kit):
    store = kit.open(compression="int8", approximate=True)
    promised = Namespace(model_fingerprint="model", layout=SMALL, arithmetic="tiles")
    with pytest.raises(ConfigError, match="promises results to the bit"):
        store.register(promised)


def test_a_rounded_page_under_an_exact_identity_does_not_open():
    layout = SLICED
    codec = codec_by_name("int8", "$")
    marked = stored_layout(layout, codec)
    forms = PageForms(codec)
    frame = memoryview(bytearray(header_bytes(marked) + marked.page_bytes))
    page = np.random.default_rng(1).normal(size=marked.page_bytes // 4).astype("<f4")
    frame[header_bytes(marked) :] = page.tobytes()

    def stored_under(identity: KVLayout) -> tuple[Expected, memoryview]:
        sums = tuple(0 for _ in range(identity.slice_count))
        header = PageHeader(bytes(32), b"k" * 32, bytes(32), 0, (1,) * identity.block_tokens, sums)
        pack(header, identity, frame)
        into = memoryview(bytearray(forms.room_bytes(identity)))
        form = forms.encode(frame, marked, into)
        assert form is not None
        header_sum = pack(
            msgspec.structs.replace(header, codec=codec.id, stored_bytes=_stored(into)), identity, into
        )
        return Expected(identity, bytes(32), b"k" * 32, bytes(32), 0, header_sum), into[: form.length]

    forms.open(*stored_under(marked), frame)
    frame[header_bytes(marked) :] = page.tobytes()
    with pytest.raises(Exception, match="lies under an exact identity"):
        PageForms(Raw()).open(*stored_under(layout), frame)


def _stored(header) -> int:
    return int.from_bytes(header[152:160], "little")


def test_a_store_of_the_host_keeps_exact_pages_only(tmp_path):
    config = StoreConfig(ssd=SsdConfig(path=str(tmp_path), compression="int8", approximate=True))
    with (
        pytest.raises(ConfigError, match="whoever attaches to the host's store asks for exact ones"),
        open_host(config, cache_dir=tmp_path, sink=discard, progress=None),
    ):
        pass
