"""What a start says about the store, and where the store lies when nobody says where."""

from functools import partial

import pytest

from workmem import app
from workmem.core.events import discard
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.testing.faulty_device import FaultPlan, FaultyDevice

CONFIG = StoreConfig(dram=DramConfig(bytes="1MiB"), ssd=SsdConfig(bytes="16MiB"))


class Said:
    """Progress that remembers its last result."""

    result = ""

    def begin(self, step: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def end(self, result: str) -> None:
        self.result = result


@pytest.fixture
def said() -> Said:
    return Said()


def test_the_store_lies_in_the_cache_folder_unless_told(tmp_path, said):
    app._open_store(CONFIG, tmp_path, discard, said).close()
    assert (tmp_path / "store" / "FORMAT").is_file()
    assert said.result == f"store opened: dram 1.0 MiB, ssd {tmp_path}/store with 0 blocks from before"


def test_a_disk_that_cannot_be_opened_is_told_and_dram_serves(tmp_path, said, monkeypatch):
    app._open_store(CONFIG, tmp_path, discard, said).close()
    plan = FaultPlan()
    plan.fail_at = 1
    monkeypatch.setattr(app, "Store", partial(Store, device=FaultyDevice(plan)))
    store = app._open_store(CONFIG, tmp_path, discard, said)
    store.close()
    assert f"ssd {tmp_path}/store cannot be opened" in said.result
    assert "Input/output error" in said.result
    assert "dram serves alone" in said.result


def test_without_an_ssd_none_is_named(tmp_path, said):
    config = StoreConfig(dram=CONFIG.dram, ssd=SsdConfig(enabled=False))
    app._open_store(config, tmp_path, discard, said).close()
    assert said.result == "store opened: dram 1.0 MiB"
    assert list(tmp_path.iterdir()) == []
