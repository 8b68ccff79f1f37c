"""A wrong hit is tried for: colliding keys, files that are not what they were, clocks that jump.

What is asked of every try is the same: each page that arrives is what its key demands, or it is a miss; the store
opens, counts right, takes pages in again, and the next start sees nothing wrong either.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from workmem.core import keys as core_keys
from workmem.core.errors import CapacityError, ConfigError, IntegrityError, LeaseError
from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.core.outcomes import MissReason
from workmem.store.arena import ALIGNMENT_BYTES as PAGE
from workmem.store.catalog import Space
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.contract import BlockId, PageWrite, SaveState
from workmem.store.device import HostDevice
from workmem.store.saver import fill
from workmem.store.store import Store
from workmem.store.tiers import journal, journal_records
from workmem.store.tiers.page_check import Expected, check_header, check_slices
from workmem.store.tiers.page_header import checksum_of
from workmem.testing.faulty_device import FaultPlan, FaultyDevice
from workmem.testing.pages import SMALL, Chain, namespace, page_bytes, read_all, settle

pytestmark = pytest.mark.timeout(90)

FRAME = PAGE + SMALL.page_bytes
"""Header and payload of a small page, as they lie on disk."""


def save(store, space: Namespace, block: BlockId, content: bytes) -> SaveState:
    """Save one block that has `content`, and wait."""

    def copy_into(view: memoryview) -> None:
        view[:] = content

    states: list[SaveState] = []
    store.save(space.root(), [PageWrite(block, copy_into, states.append)])
    assert store.flush(20)
    return states[0]


# -- keys


def test_keys_that_differ_in_their_last_byte_are_told_apart_in_every_tier(kit):
    space, stem = namespace(), hashlib.sha256(b"stem").digest()[:31]
    blocks = [
        BlockId(BlockKey(stem + bytes([number])), space.root(), (number, 0, 0, 0), 0) for number in range(48)
    ]
    chance, saved = random.Random(1), set()
    for _ in range(3):
        store = kit.open(dram="96KiB", ssd="256KiB")
        store.register(space)
        for _ in range(60):
            block = chance.choice(blocks)
            if chance.random() < 0.5:
                save(store, space, block, page_bytes(block.key, SMALL))
                saved.add(block.key)
            elif read_all(store, space.root(), [block.key]):
                assert block.key in saved
        store.close()
    assert len(saved) > 30


def test_contexts_whose_keys_collide_are_never_read_for_each_other(kit, monkeypatch):
    """With a digest of three bits; what came back is taken only where its tokens are those asked for."""
    monkeypatch.setattr(core_keys, "hashlib", SimpleNamespace(sha256=_three_bits))
    space, chance = namespace(), random.Random(2)
    contexts = [Chain(space, 1, seed=seed) for seed in range(40)]
    assert len({context.keys[0] for context in contexts}) <= 8
    found = refused = 0
    for _ in range(3):
        store = kit.open(dram="64KiB", ssd="256KiB")
        store.register(space)
        for _ in range(80):
            context = chance.choice(contexts)
            mine = _content_of(context)
            if chance.random() < 0.4:
                save(store, space, context.block(0), mine)
                continue
            lease = store.lease(context.root, context.keys, owner="t", ttl_s=60)
            settle(lease)
            if lease.ready and lease.tokens(0) == tuple(context.tokens):
                assert bytes(lease.page(0)) == mine
                found += 1
            else:
                refused += lease.ready
            lease.release()
        store.audit()
        store.close()
    assert found > 5
    assert refused > 5, "no two contexts met under one key"


def _three_bits(body: bytes):
    digest = bytes([hashlib.sha256(body).digest()[0] & 7]) * 32
    return SimpleNamespace(digest=lambda: digest)


def _content_of(context: Chain) -> bytes:
    """Bytes that follow from the tokens, as KV does: the key of these contexts says too little."""
    return page_bytes(repr(context.tokens).encode(), SMALL)


# -- files


class Disk:
    """A closed store of three chains, an older copy of its folder, and another store with other pages."""

    def __init__(self, kit, template: Path) -> None:
        self.kit = kit
        self.folder: Path = kit.folder
        self.chains = [Chain(namespace(), 4, seed=seed) for seed in range(4)]
        for name in ("store", "yesterday", "other"):
            shutil.copytree(template / name, kit.folder.parent / name)
        self.yesterday, self.other = (kit.folder.parent / name for name in ("yesterday", "other"))

    def segments(self, folder: Path | None = None) -> list[Path]:
        return sorted(((folder or self.folder) / "segments").iterdir())

    def check(self, *, path: Path | None = None) -> int:
        """Open it: all that is there is right, and saving works; so it does at the start after that."""
        found = 0
        for turn in range(2):
            store = self.kit.open(path=path, ssd="512KiB")
            for chain in self.chains:
                store.register(chain.space)
                for key in chain.keys:
                    found += read_all(store, chain.root, [key]) if turn == 0 else 0
            store.audit()
            for chain in self.chains:
                assert SaveState.DROPPED not in chain.save(store)
                assert read_all(store, chain.root, chain.keys) == 4
            store.close()
        return found


def _add(folder: Path, *seeds: int) -> None:
    """Save chains of these seeds."""
    tier = SsdConfig(path=str(folder), bytes="256KiB")
    with Store(StoreConfig(dram=DramConfig(bytes="1MiB"), ssd=tier)) as store:
        for seed in seeds:
            Chain(namespace(), 4, seed=seed).save(store)


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("template")
    _add(made / "store", 0)
    shutil.copytree(made / "store", made / "yesterday")
    _add(made / "store", 1, 2)
    _add(made / "other", 1, 3)
    assert len(list((made / "store" / "segments").iterdir())) >= 2
    return made


@pytest.fixture
def disk(kit, template) -> Disk:
    return Disk(kit, template)


def _swap(a: Path, b: Path, start: int) -> None:
    """Exchange what two files hold behind `start`."""
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(first[:start] + second[start:])
    b.write_bytes(second[:start] + first[start:])


def _zeros(path: Path, start: int, end: int | None = None) -> None:
    raw = bytearray(path.read_bytes())
    end = len(raw) if end is None else end
    raw[start:end] = bytes(end - start)
    path.write_bytes(raw)


def _copy_range(path: Path, source: int, target: int, size: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[target : target + size] = raw[source : source + size]
    path.write_bytes(raw)


def _copy_all(disk: Disk, source: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(disk.folder / name, ignore_errors=True)
        copy = shutil.copytree if (source / name).is_dir() else shutil.copyfile
        copy(source / name, disk.folder / name)


def _refile(disk: Disk, changed: Namespace) -> None:
    """The journal says, in whole batches, that the pages are of another namespace."""
    file = journal.Journal(HostDevice(), disk.folder / "journal", _store_id(disk))
    records = file.open()
    fields = {"root": changed.root(), "json": msgspec.json.encode(changed)}
    file.rewrite(
        [
            msgspec.structs.replace(record, **fields)
            if isinstance(record, journal_records.NamespaceEntry)
            else record
            for record in records
        ]
    )
    file.close()
    disk.chains += [Chain(changed, 4, seed=seed) for seed in range(3)]
    # The very keys that are in the journal, asked for under the other root.
    for mine, theirs in zip(disk.chains[:3], disk.chains[-3:], strict=True):
        theirs.keys = mine.keys


def _store_id(disk: Disk) -> bytes:
    return bytes.fromhex(msgspec.json.decode((disk.folder / "FORMAT").read_bytes())["store_id"])


ONE_HEAD = msgspec.structs.replace(SMALL, kv_heads=1, head_dim=32)
assert ONE_HEAD.page_bytes == SMALL.page_bytes

TRIES: dict[str, tuple[Callable[[Disk], object], int, int]] = {
    "nothing at all": (lambda disk: None, 12, 12),
    "two segments exchanged": (lambda disk: _swap(*disk.segments()[:2], 0), 0, 11),
    "what is in two segments exchanged": (lambda disk: _swap(*disk.segments()[:2], PAGE), 0, 11),
    "a header copied from another page": (
        lambda disk: _copy_range(disk.segments()[0], PAGE, PAGE + FRAME, PAGE),
        11,
        11,
    ),
    "a payload copied from another page": (
        lambda disk: _copy_range(disk.segments()[0], 2 * PAGE, 2 * PAGE + FRAME, PAGE),
        11,
        11,
    ),
    "a page copied over another": (
        lambda disk: _copy_range(disk.segments()[0], PAGE, PAGE + FRAME, FRAME),
        11,
        11,
    ),
    "zeros of the same length": (lambda disk: _zeros(disk.segments()[0], 0), 0, 11),
    "zeros behind the segment's header": (lambda disk: _zeros(disk.segments()[0], PAGE), 0, 11),
    "zeros in a payload": (lambda disk: _zeros(disk.segments()[0], 2 * PAGE, 3 * PAGE), 11, 11),
    "a journal of zeros": (lambda disk: _zeros(disk.folder / "journal", 0), 0, 0),
    "zeros behind the journal's header": (lambda disk: _zeros(disk.folder / "journal", 37), 0, 0),
    "the journal of another store": (lambda disk: _copy_all(disk, disk.other, "journal"), 0, 0),
    "journal and name of another store": (
        lambda disk: _copy_all(disk, disk.other, "journal", "FORMAT"),
        0,
        0,
    ),
    "segments of another store": (lambda disk: _copy_all(disk, disk.other, "segments"), 0, 0),
    "the journal of yesterday": (lambda disk: _copy_all(disk, disk.yesterday, "journal"), 4, 4),
    "the segments of yesterday": (lambda disk: _copy_all(disk, disk.yesterday, "segments"), 0, 4),
    "pages filed under another model": (lambda disk: _refile(disk, namespace("another")), 0, 0),
    "pages filed under another layout": (lambda disk: _refile(disk, namespace("model", ONE_HEAD)), 0, 0),
    "pages filed under another tenant": (
        lambda disk: _refile(disk, msgspec.structs.replace(namespace(), tenant_salt="other")),
        0,
        0,
    ),
    "pages filed under other weights": (
        lambda disk: _refile(disk, msgspec.structs.replace(namespace(), weights_epoch=1)),
        0,
        0,
    ),
}


@pytest.mark.parametrize("what", TRIES)
def test_files_that_are_not_what_they_were_give_misses(disk, what):
    harm, least, most = TRIES[what]
    harm(disk)
    assert least <= disk.check() <= most


@pytest.mark.parametrize(
    "size", [0, 1, 512, PAGE - 1, PAGE, PAGE + 1, PAGE + FRAME - 1, PAGE + FRAME, 3 * FRAME]
)
def test_a_segment_cut_anywhere_serves_what_lies_before_the_cut(disk, size):
    first = disk.segments()[0]
    whole = first.stat().st_size
    with first.open("r+b") as file:
        file.truncate(size)
    lost = (whole - PAGE) // FRAME - max(0, size - PAGE) // FRAME
    assert disk.check() == 12 - lost


def test_a_copy_of_the_folder_that_went_its_own_way_is_not_mixed_in(disk):
    """Same name, same numbers of segments, and pages of other blocks at the same places."""
    twin = disk.folder.parent / "twin"
    shutil.copytree(disk.yesterday, twin)
    _add(twin, 7, 8)
    for mine, theirs in zip(disk.segments(), disk.segments(twin), strict=False):
        _swap(mine, theirs, 0)
    assert 0 < disk.check() < 12
    assert 0 < disk.check(path=twin) < 12


@pytest.mark.parametrize(
    "name",
    [
        "1.seg",
        "0000000009.seg",
        "²²²²²²²²²².seg",
        "99999999999.seg",
        "4294967295.seg",
        "-000000001.seg",
        "x.seg",
    ],
)
def test_files_under_numbers_that_are_not_theirs_change_nothing(disk, name):
    shutil.copyfile(disk.segments()[0], disk.folder / "segments" / name)
    assert disk.check() == 12


def test_a_name_file_of_zeros_stops_the_start_and_leaves_the_folder_alone(disk):
    kept = [path.read_bytes() for path in disk.segments()]
    _zeros(disk.folder / "FORMAT", 0)
    with pytest.raises(ConfigError, match="damaged"):
        disk.kit.open()
    assert [path.read_bytes() for path in disk.segments()] == kept


@pytest.mark.parametrize("seed", range(16))
def test_random_damage_to_any_file_is_a_miss_at_worst(disk, seed):
    chance = random.Random(seed)
    files = [disk.folder / "journal", *disk.segments()]
    for _ in range(chance.randint(1, 4)):
        path = chance.choice(files)
        raw = bytearray(path.read_bytes())
        if not raw:
            continue
        at, size = chance.randrange(len(raw)), chance.choice((1, 8, 512, PAGE, FRAME))
        how = chance.randrange(6)
        if how == 0:
            raw[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            raw[at : at + size] = bytes(len(raw[at : at + size]))
        elif how == 2:
            del raw[at:]
        elif how == 3:
            raw[at:at] = chance.randbytes(size)
        elif how == 4:
            source = chance.randrange(len(raw))
            raw[at : at + size] = raw[source : source + len(raw[at : at + size])]
        else:
            donor = chance.choice(files).read_bytes()
            raw[at:] = donor[at:] or raw[at:]
        path.write_bytes(raw)
    assert disk.check() <= 12


# -- clocks


class JumpingClock:
    """Goes both ways at random; the host's time of day is nonsense altogether."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._now = 1e6
        self.jumps = True

    def monotonic(self) -> float:
        if self.jumps and self._chance.random() < 0.05:
            self._now += self._chance.choice((-1e5, -30.0, -1.0, 1.0, 30.0, 1e5))
        self._now += 1e-4
        return self._now

    def wall(self) -> float:
        return self._chance.choice((-1.0, 0.0, 1e12, float("inf")))


@pytest.mark.parametrize("seed", range(2))
def test_a_clock_that_jumps_costs_leases_never_a_right_page(kit, seed):
    chance = random.Random(seed)
    clock = JumpingClock(chance)
    store = kit.open(dram="96KiB", ssd="256KiB", clock=clock)
    chains = [Chain(namespace(), 4, seed=number) for number in range(10)]
    store.register(chains[0].space)
    held, compared, ended = [], 0, 0
    for _ in range(300):
        chain = chance.choice(chains)
        if chance.random() < 0.4:
            store.save(chain.root, chain.writes())
            store.flush(0.05)
            continue
        try:
            held.append(store.lease(chain.root, chain.keys, owner="t", ttl_s=chance.choice((1.0, 60.0))))
        except CapacityError:
            ended += 1
        if len(held) > 3:
            held.pop(0).release()
        for lease in held:
            try:
                for index in range(lease.ready):
                    page = bytes(lease.page(index))
                    lease.page(index)  # Read first, asked after: while it holds, the page was right.
                    assert page == page_bytes(lease.keys[index], SMALL)
                    compared += 1
            except LeaseError:
                ended += 1
    for lease in held:
        lease.release()
    clock.jumps = False
    store.pool.leases.expire_leases()
    assert store.flush(20)
    store.audit()
    assert store.gauges()["store_dram_quarantined_bytes"] == 0
    assert compared > 100
    assert ended


def test_a_clock_set_back_takes_no_page_from_its_holder(kit, hand_clock):
    store = kit.open(dram="64KiB", clock=hand_clock)
    chain = Chain(namespace(), 3)
    chain.save(store)
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    for back in (5.0, 1e6):
        hand_clock.now -= back
        store.pool.leases.expire_leases()
        for seed in range(1, 6):
            more = Chain(namespace(), 3, seed=seed)
            more.save(store)
        assert [bytes(lease.page(index)) for index in range(3)] == [
            page_bytes(key, SMALL) for key in chain.keys
        ]
    lease.release()


def test_a_clock_set_forward_ends_leases_and_their_pages_serve_the_next(kit, hand_clock):
    store = kit.open(dram="64KiB", ssd=0, clock=hand_clock)
    chain = Chain(namespace(), 3)
    chain.save(store)
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=3600)
    stale = lease.page(0)
    hand_clock.now += 1e9
    for seed in range(1, 20):
        other = Chain(namespace(), 3, seed=seed)
        other.save(store)
        # Used again, so that it is worth more than what is to leave.
        assert read_all(store, other.root, other.keys)
    assert bytes(stale) != page_bytes(chain.keys[0], SMALL), "the frame was never given to another"
    for ask in (
        lease.page,
        lease.checksums,
        lease.tokens,
        lease.page_address,
        lease.quarantine,
    ):
        with pytest.raises(LeaseError):
            ask(0)
    with pytest.raises(LeaseError):
        lease.renew(10)
    lease.release()
    assert store.lookup(chain.root, chain.keys).reason is MissReason.EVICTED


# -- the check itself


@pytest.mark.parametrize(
    "field", ["none", "root", "key", "parent", "depth", "header_sum", "layout", "payload"]
)
def test_a_page_is_refused_for_each_thing_that_is_not_as_asked(field):
    """One by one: a header that is right by its own checksum and by the journal's may still be of another block."""
    space, chain = Space(namespace(), 1), Chain(namespace(), 2)
    block, raw = chain.block(1), bytearray(FRAME)
    fill(space, chain.writes()[1], memoryview(raw))
    asked = {"layout": SMALL, "root": chain.root, "key": block.key, "parent": block.parent, "depth": 1}
    asked["header_sum"] = checksum_of(raw)
    if field == "layout":
        asked["layout"] = ONE_HEAD
    elif field == "payload":
        raw[-1] ^= 1
    elif field in ("root", "key", "parent"):
        asked[field] = hashlib.sha256(b"other").digest()
    elif field != "none":
        asked[field] += 1

    def check() -> None:
        header = check_header(Expected(**asked), memoryview(raw))
        check_slices(header, asked["layout"], memoryview(raw)[PAGE:])

    if field == "none":
        check()
        return
    with pytest.raises(IntegrityError):
        check()


def test_a_page_that_is_read_while_its_namespace_is_purged_is_never_seen(kit, caplog):
    chain, plan = Chain(namespace(), 2), FaultPlan()
    store = kit.open()
    chain.save(store)
    store.close()
    again = kit.open(device=FaultyDevice(plan))
    again.register(chain.space)
    began, purged = threading.Event(), threading.Event()

    def hold(path: Path, offset: int) -> None:
        del path, offset
        began.set()
        purged.wait(20)

    plan.before_read = hold
    lease = again.lease(chain.root, chain.keys, owner="t", ttl_s=60)
    assert began.wait(20)
    again.purge(lambda space: space == chain.space)
    purged.set()
    settle(lease)
    assert lease.ready == 0
    lease.release()
    assert again.flush(20)
    arena = again.arena
    assert page_bytes(chain.keys[0], SMALL)[:64] not in bytes(arena.readable(0, arena.capacity_bytes))
    assert again.lookup(chain.root, chain.keys).blocks == 0
    assert "a bug of ours" not in caplog.text
