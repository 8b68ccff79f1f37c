"""A pool whose objects are sealed: what others read, change, cut, swap and put again, and what becomes of it."""

from __future__ import annotations

import ctypes
import itertools
import os

import pytest

from workmem.core.errors import ConfigError, IntegrityError
from workmem.core.events import BlockQuarantined
from workmem.core.outcomes import MissReason
from workmem.store.codecs.key_file import KEY_BYTES
from workmem.store.codecs.pool_sealing import SEAL_BYTES, PoolCipher
from workmem.store.config import BelowConfig, DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.store.tiers.contract import ArenaMemory, HeldPage, PageName, Tier
from workmem.store.tiers.mooncake.link import Wanted
from workmem.store.tiers.mooncake.links import borrow, give_back
from workmem.store.tiers.mooncake.memory import span_of
from workmem.store.tiers.mooncake.objects import PoolObject
from workmem.store.tiers.mooncake.options import parse_options
from workmem.store.tiers.mooncake.outcomes import GetResult, PutResult
from workmem.store.tiers.mooncake.sealed_link import SCRATCH_BYTES, SealedLink
from workmem.store.tiers.mooncake.tier import MooncakeTier, mooncake_tier
from workmem.testing.mooncake import pool
from workmem.testing.pages import SLICED, Chain, namespace, read_all, settle
from workmem.testing.tier_suite import TierSuite
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(120)
POOLS = itertools.count()


@pytest.fixture(scope="module")
def shared():
    with pool(64 * 2**20) as master:
        options = parse_options({"master": master.address, "capacity": "64MiB"})
        borrow(options)
        try:
            yield master
        finally:
            give_back(options)


@pytest.fixture
def link(shared):
    """A client beside the stores': somebody who reaches the pool."""
    options = parse_options({"master": shared.address, "capacity": "64MiB"})
    yield borrow(options)
    give_back(options)


def key_file(folder, name: str = "key") -> str:
    file = folder / name
    if not file.exists():
        file.write_bytes(os.urandom(KEY_BYTES))
        file.chmod(0o600)
    return str(file)


def options_of(master, key: str, name: str = "") -> dict:
    return {
        "master": master.address,
        "capacity": "64MiB",
        "pool": name or f"s{next(POOLS)}",
        "poll_s": 0.02,
        "key_file": key,
    }


def opened(options: dict, sink=lambda event: None) -> Store:
    return Store(
        StoreConfig(
            dram=DramConfig(bytes="4MiB"),
            below=BelowConfig(tier="mooncake", options=options),
            ssd=SsdConfig(enabled=False),
        ),
        sink,
    )


class TestSealedMooncakeTier(TierSuite):
    @pytest.fixture(autouse=True)
    def _pool(self, shared, tmp_path):
        self.options = options_of(shared, key_file(tmp_path))

    def make(self) -> Tier:
        return mooncake_tier({**self.options, "pool": f"s{next(POOLS)}"})

    def again(self, tier: MooncakeTier) -> Tier | None:
        return MooncakeTier(tier._options)


# The cipher


def test_a_page_opens_at_its_own_place_under_its_own_key_only():
    cipher, other = PoolCipher(bytes(range(32))), PoolCipher(bytes(range(1, 33)))
    plain = os.urandom(5000)
    sealed, into = bytearray(5000 + SEAL_BYTES), bytearray(5000)
    cipher.seal_page("name", 3, memoryview(plain), memoryview(sealed))
    cipher.open_page("name", 3, memoryview(sealed), memoryview(into))
    assert bytes(into) == plain
    changed = bytearray(sealed)
    changed[4000] ^= 1
    for key, name, index, value in (
        (other, "name", 3, sealed),
        (cipher, "names", 3, sealed),
        (cipher, "name", 2, sealed),
        (cipher, "name", 3, changed),
    ):
        into[:] = b"x" * 5000
        with pytest.raises(IntegrityError):
            key.open_page(name, index, memoryview(value), memoryview(into))
        assert bytes(into) == bytes(5000)


def test_a_word_opens_under_its_own_name_only_and_is_no_page():
    cipher = PoolCipher(bytes(range(32)))
    sealed = cipher.seal_word("name", b"word")
    assert cipher.open_word("name", sealed) == b"word"
    for name, value in (("other", sealed), ("name", sealed[:-1]), ("name", sealed[:20]), ("name", b"")):
        with pytest.raises(IntegrityError):
            cipher.open_word(name, value)
    with pytest.raises(IntegrityError):
        cipher.open_page("name", 0, memoryview(sealed), memoryview(bytearray(4)))


def test_what_is_sealed_twice_is_never_the_same():
    """Two processes with one key are two ciphers with one key: neither knows what the other has drawn."""
    ciphers = [PoolCipher(bytes(range(32))) for _ in range(2)]
    nonces = {cipher.seal_word("n", b"w")[:24] for cipher in ciphers for _ in range(500)}
    assert len(nonces) == 1000


def test_a_key_file_that_cannot_be_used_is_said_by_its_setting(tmp_path):
    options = {"master": "127.0.0.1:9", "capacity": "1MiB", "key_file": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match=r"\$\.store\.below\.options\.key_file: there is no key file"):
        mooncake_tier(options)


# The link


class Memory:
    """A link whose pool is a dict."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self.known: dict[int, int] = {}
        self.refuses = False

    def register(self, address, size):
        if self.refuses:
            raise OSError("no more may be locked")
        self.known[address] = size

    def unregister(self, address):
        del self.known[address]

    def put(self, objects, spans):
        for one, parts in zip(objects, spans, strict=True):
            assert all(any(a <= at and at + n <= a + s for a, s in self.known.items()) for at, n in parts)
            self.values[one.name] = b"".join(_bytes_at(*part) for part in parts)
            assert len(self.values[one.name]) == one.size
        return [PutResult.STORED] * len(objects)

    def get_whole(self, wanted):
        return self.get_some(wanted, 0)

    def get_some(self, wanted, base):
        for one in wanted:
            value = self.values[one.inside.name]
            if len(value) != one.inside.size:
                return [GetResult.BROKEN] * len(wanted)
            for index, (at, size) in zip(one.indices, one.spans, strict=True):
                start = one.inside.offsets[index]
                _view_at(at, size)[:] = value[start : start + size]
        return [GetResult.ARRIVED] * len(wanted)


def _view_at(address, size):
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _bytes_at(address, size):
    return bytes(_view_at(address, size))


def test_scratch_is_bounded_known_to_the_engine_and_let_go_of():
    size = 1 << 20
    arena = bytearray(os.urandom(12 * size))
    view = memoryview(arena)
    start = _address(arena)
    where = ArenaMemory(start, len(arena))
    space = namespace()
    pages = [
        HeldPage(PageName(space.root(), bytes([i]) * 32), space, bytes(32), i, size, 7) for i in range(12)
    ]
    spans = [span_of(view[i * size : (i + 1) * size], where) for i in range(12)]
    inner = Memory()
    sealed = SealedLink(inner, PoolCipher(bytes(range(32))), "p", threads=1)
    objects = [PoolObject(f"o{i}", (pages[i],)) for i in range(6)]
    large = PoolObject("large", tuple(pages[6:]))
    before = bytes(arena)
    assert sealed.put([*objects, large], [*([s] for s in spans[:6]), spans[6:]]) == [PutResult.STORED] * 7
    assert list(inner.known.values()) == [6 * (size + SEAL_BYTES)]
    assert not any(
        before[i * size : i * size + 64] in value for i in range(12) for value in inner.values.values()
    )
    assert not any("o1" in name or "large" in name for name in inner.values)
    arena[:] = bytes(len(arena))
    wanted = [Wanted(one, (0,), (span,)) for one, span in zip(objects, spans, strict=False)]
    assert sealed.get_whole(wanted) == [GetResult.ARRIVED] * 6
    assert sealed.get_some([Wanted(large, (1, 5), (spans[7], spans[11]))], start) == [GetResult.ARRIVED]
    for i in (*range(6), 7, 11):
        assert arena[i * size : (i + 1) * size] == before[i * size : (i + 1) * size]
    assert not any(arena[8 * size : 9 * size])
    sealed.release()
    assert not inner.known
    inner.refuses = True
    for _ in range(3):  # The turn is given back: the one thread may try again.
        with pytest.raises(OSError, match="no more"):
            sealed.put(objects[:1], [spans[:1]])
    inner.refuses = False
    assert sealed.put(objects[:1], [spans[:1]]) == [PutResult.STORED]
    assert list(inner.known.values()) == [SCRATCH_BYTES]


def _address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# Stores


def raw_pages(link, store: Store, chain: Chain) -> list[str]:
    """Names in the pool of the objects that hold the chain."""
    session = store._below.tier.tier._session
    places = session._shelf.find([PageName(chain.root, bytes(key)) for key in chain.keys])
    return list(dict.fromkeys(session._link.name(place.inside.name) for place in places if place is not None))


def test_stores_of_one_key_share_pages_and_nothing_of_them_lies_in_the_pool_in_the_clear(
    shared, link, tmp_path
):
    options = options_of(shared, key_file(tmp_path))
    chain = Chain(namespace(layout=SLICED), 12)
    with opened(options) as mine, opened(options) as other:
        other.register(chain.space)
        chain.save(mine)
        wait_until(lambda: other.lookup(chain.root, chain.keys).blocks == 12, 20)
        assert read_all(other, chain.root, chain.keys[:5]) == 5
        assert read_all(other, chain.root, chain.keys) == 12
        names = raw_pages(link, mine, chain)
        values = link.read(names)
        assert names
        assert all(values)
        lease = mine.lease(chain.root, chain.keys, owner="t", ttl_s=20)
        settle(lease)
        plain = [bytes(lease.page(index)) for index in range(12)]
        lease.release()
        for value in values:
            for secret in (
                chain.root,
                bytes(chain.keys[0]),
                bytes(chain.keys[3]),
                plain[0][:32],
                plain[5][-32:],
            ):
                assert secret not in value
        assert not any(chain.root[:4].hex() in name for name in names)


@pytest.mark.parametrize("others", ["another", ""])
def test_stores_of_other_keys_and_of_none_share_a_pool_and_no_page(shared, tmp_path, others):
    mine_options = options_of(shared, key_file(tmp_path))
    name = mine_options["pool"]
    other_options = options_of(shared, key_file(tmp_path, others) if others else "", name)
    chain = Chain(namespace(layout=SLICED), 6)
    with opened(mine_options) as mine, opened(other_options) as other, opened(mine_options) as third:
        for store in (other, third):
            store.register(chain.space)
        chain.save(mine)
        wait_until(lambda: third.lookup(chain.root, chain.keys).blocks == 6, 20)
        assert other.lookup(chain.root, chain.keys).blocks == 0
        # It may put the same, and each store reads its own.
        chain.save(other)
        for store in (mine, other, third):
            assert read_all(store, chain.root, chain.keys) == 6
        assert not [
            key for key in other._below.tier.tier.counts if key.startswith("get_") and key != "get_arrived"
        ]


@pytest.mark.parametrize("how", ["changed", "cut", "longer", "swapped", "another key"])
def test_an_object_that_somebody_changed_is_a_corrupt_miss_and_no_byte_of_it_comes_out(
    shared, link, tmp_path, how
):
    options, events = options_of(shared, key_file(tmp_path)), []
    chain, second = Chain(namespace(layout=SLICED), 6), Chain(namespace(layout=SLICED), 6, seed=1)
    foreign = {**options, "key_file": key_file(tmp_path, "foreign")}
    with opened(options) as mine, opened(options, events.append) as other, opened(foreign) as stranger:
        for one in (chain, second):
            other.register(one.space)
            one.save(mine)
            one.save(stranger)
            wait_until(lambda c=one: other.lookup(c.root, c.keys).blocks == 6, 20)
        name, another = raw_pages(link, mine, chain)[0], raw_pages(link, mine, second)[0]
        strange = raw_pages(link, stranger, chain)[0]
        value = bytearray(link.read([name])[0])
        pages = len(value) // (196 << 10)
        if how == "changed":
            value[-100] ^= 1
        elif how == "cut":
            value = value[:-4096]
        elif how == "longer":
            value += bytes(4096)
        else:
            value = link.read([another if how == "swapped" else strange])[0]
        link.remove([name])
        assert link.write(name, bytes(value))
        lease = other.lease(chain.root, chain.keys, owner="t", ttl_s=20)
        settle(lease)
        assert lease.failed is MissReason.CORRUPT
        good = lease.ready
        assert good == (pages - 1 if how == "changed" else 0)
        lease.release()
        assert MissReason.CORRUPT in [e.reason for e in events if isinstance(e, BlockQuarantined)]
        assert other.lookup(chain.root, chain.keys).blocks == good
        assert read_all(other, second.root, second.keys) == 6


def test_a_log_that_another_wrote_is_not_believed(shared, link, tmp_path):
    """Whoever reaches the pool can copy a sealed entry to the next number: it opens under its own name only."""
    options = options_of(shared, key_file(tmp_path))
    chain = Chain(namespace(layout=SLICED), 6)
    with opened(options) as mine, opened(options) as other:
        other.register(chain.space)
        chain.save(mine)
        wait_until(lambda: other.lookup(chain.root, chain.keys).blocks == 6, 20)
        session = mine._below.tier.tier._session
        log = session._log
        prefix = f"workmem/1/{options['pool']}/log/{log._writer}/"
        names = [session._link.name(f"{prefix}{number}") for number in (log._next - 1, log._next)]
        (value,) = link.read(names[:1])
        assert value
        assert link.write(names[1], value)
        follower = other._below.tier.tier._session._follower
        wait_until(lambda: follower.unreadable == 1, 20)
