"""A journal of any length is cut into batches that replay takes."""

from __future__ import annotations

import numpy as np
import pytest

from workmem.store.device import HostDevice
from workmem.store.tiers import journal
from workmem.store.tiers.journal import Journal
from workmem.store.tiers.journal_records import PUTS, NamespaceEntry, count_records


@pytest.mark.parametrize("arrays", [0, 1, 7])
def test_a_rewrite_larger_than_a_batch_may_be_is_read_back_whole(tmp_path, monkeypatch, arrays):
    monkeypatch.setattr(journal, "_REWRITE_BATCH_BYTES", 100_000)
    monkeypatch.setattr(journal, "_BATCH_BYTES_MAX", 200_000)
    puts = np.zeros(1000, PUTS)
    puts["kind"] = 2
    written = [NamespaceEntry(1, bytes(32), b"{}"), *[puts] * arrays]
    made = Journal(HostDevice(), tmp_path / "journal", bytes(16))
    made.rewrite(written)
    made.close()
    again = Journal(HostDevice(), tmp_path / "journal", bytes(16))
    assert count_records(again.open()) == 1 + 1000 * arrays
    assert again.torn_bytes == 0
    again.close()
