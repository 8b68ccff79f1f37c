"""Replay against the slow reading of the same journal: the last word on a key holds, whatever the order."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.store.catalog import Catalog, Space
from workmem.store.tiers import journal, journal_records
from workmem.store.tiers.journal_records import (
    PUTS,
    DeleteEntry,
    DropEntry,
    NamespaceEntry,
    PutEntry,
    decode,
    encode,
)
from workmem.store.tiers.replay import Replay
from workmem.testing.pages import Chain, namespace, read_all

SPACES = [namespace("one"), namespace("two")]
SEGMENTS = {1: 40 * 4096, 2: 12 * 4096}


def key(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


puts = st.builds(
    lambda space, block, segment, offset: PutEntry(
        space, key(block), key(block - 1) if block else b"\0" * 32, block, segment, offset * 4096, 8192, block
    ),
    st.integers(1, 2),
    st.integers(0, 12),
    st.integers(1, 3),
    st.integers(1, 30),
)
deletes = st.builds(
    lambda space, block: DeleteEntry(space, key(block)), st.integers(1, 2), st.integers(0, 12)
)
batches = st.lists(
    st.tuples(st.lists(deletes, max_size=3), st.lists(puts, max_size=6), st.booleans()), max_size=8
)


class Model:
    """The journal's rules, one record at a time."""

    def __init__(self) -> None:
        self.spaces: dict[int, dict[bytes, PutEntry]] = {1: {}, 2: {}}

    def take(self, entries) -> None:
        for entry in entries:
            if isinstance(entry, DropEntry):
                self.spaces.pop(entry.number, None)
                continue
            mine = self.spaces.get(entry.number, {})
            if isinstance(entry, DeleteEntry):
                mine.pop(entry.key, None)
            elif entry.offset + entry.length <= SEGMENTS.get(entry.segment, 0):
                mine.pop(entry.key, None)
                mine[entry.key] = entry


@settings(max_examples=150, deadline=None)
@given(batches=batches)
def test_replay_agrees_with_a_dict(batches):
    names = [NamespaceEntry(i + 1, s.root(), msgspec.json.encode(s)) for i, s in enumerate(SPACES)]
    payloads, model = [b"".join(map(encode, names))], Model()
    for gone, new, drops in batches:
        drop = [DropEntry(2)] if drops else []
        payloads.append(b"".join(map(encode, [*drop, *gone, *new])))
        model.take([*drop, *gone, *new])
    catalog, spaces = Catalog(), {}

    def open_space(found, number):
        return spaces.setdefault(number, Space(found, number))

    replay = Replay(catalog, SEGMENTS, open_space, lambda space: spaces.pop(space.number))
    for payload in payloads:
        replay.take(list(decode(payload)))
    assert set(spaces) == set(model.spaces)
    for number, wanted in model.spaces.items():
        space = spaces[number]
        rows = replay.rows(space)
        assert [catalog.key[row] for row in rows] == list(wanted)
        for row, entry in zip(rows, wanted.values(), strict=True):
            assert catalog.parent[row] == entry.parent
            assert (catalog.segment[row], catalog.offset[row] * 4096) == (entry.segment, entry.offset)
            assert (catalog.depth[row], catalog.header_sum[row]) == (entry.depth, entry.header_sum)
        parents = replay.parents(space)
        if parents is not None:
            assert list(parents) == [space.rows.get(catalog.parent[row], -1) for row in rows]
    assert len(catalog) == sum(len(wanted) for wanted in model.spaces.values())


def test_puts_side_by_side_are_what_single_ones_are():
    entry = PutEntry(7, key(1), key(0), 3, 9, 4096 * 5, 4096 * 2, 77)
    (found,) = decode(encode(entry))
    assert isinstance(found, np.ndarray)
    assert found.dtype == PUTS
    assert PUTS.itemsize == journal_records._PUT.size
    assert encode(found) == encode(entry)


def test_a_rewritten_journal_is_read_back_however_many_records_it_has(kit, monkeypatch):
    monkeypatch.setattr(journal, "REWRITE_RECORDS", 16)
    monkeypatch.setattr(journal, "_BATCH_BYTES_MAX", 4096)
    monkeypatch.setattr(journal, "_REWRITE_BATCH_BYTES", 2048)
    store = kit.open()
    chains = [Chain(namespace(), 10, seed=seed) for seed in range(20)]
    for chain in chains:
        chain.save(store)
    store._below.tier._journal.is_broken = True  # As after an append that failed: the next write rewrites it.
    Chain(namespace(), 1, seed=99).save(store)
    store.close()
    again = kit.open()
    for chain in chains:
        again.register(chain.space)
        assert read_all(again, chain.root, chain.keys) == 10


def test_a_batch_that_would_not_be_read_back_is_refused(monkeypatch):
    monkeypatch.setattr(journal, "_BATCH_BYTES_MAX", 64)
    with pytest.raises(Exception, match="would not be read back"):
        journal._batch(0, bytes(65))
