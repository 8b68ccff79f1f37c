"""What the store's tests share: stores on a temporary folder, closed and checked at the end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from workmem.core.events import Event
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store


class Kit:
    """Opens stores on one folder and keeps their events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self._open: list[Store] = []

    def config(
        self, *, dram: str | int = "1MiB", ssd: str | int = "16MiB", path: Path | None = None, **more: Any
    ) -> StoreConfig:
        """A small configuration; `ssd=0` leaves the tier out, `eviction` is for both."""
        own = {name: more.pop(name) for name in ("save_queue_pages", "quotas", "pins") if name in more}
        eviction = more.pop("eviction", "value")
        tier = SsdConfig(
            enabled=bool(ssd), path=str(path or self.folder), bytes=ssd, eviction=eviction, **more
        )
        return StoreConfig(dram=DramConfig(bytes=dram, eviction=eviction), ssd=tier, **own)

    def open(self, *, clock: Any = None, device: Any = None, **settings: Any) -> Store:
        """A store; closed at the end of the test at the latest."""
        store = Store(self.config(**settings), self.events.append, clock, device)
        self._open.append(store)
        return store

    def of(self, kind: type[Any]) -> list[Any]:
        """Events of one kind so far."""
        return [event for event in list(self.events) if isinstance(event, kind)]

    def names(self) -> set[str]:
        """Names of the bounds reached so far."""
        return {event.name for event in list(self.events) if hasattr(event, "name")}

    def close(self) -> None:
        """Audit and close what is open."""
        for store in self._open:
            store.audit()
            store.close()


class HandClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


@pytest.fixture
def kit(tmp_path: Path):
    made = Kit(tmp_path / "store")
    yield made
    made.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("workmem-s")]
    assert left == [], f"threads left behind: {left}"


@pytest.fixture
def hand_clock() -> HandClock:
    return HandClock()
