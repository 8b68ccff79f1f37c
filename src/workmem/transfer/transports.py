"""Which ways bytes can go from this host, and why not the others: for a doctor to list."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from workmem.core.errors import ConfigError
from workmem.transfer.mooncake_engine import PROTOCOLS, built_protocols, load_engine


class Device(NamedTuple):
    """A network card that can reach memory by itself."""

    name: str
    numa_node: int
    """Near which memory it is; -1 where the host does not say."""
    state: str
    """As the card's first port says, `4: ACTIVE`."""
    rate: str
    """As the card's first port says, `200 Gb/sec (4X HDR)`."""


class Transport(NamedTuple):
    """A way for bytes."""

    name: str
    is_there: bool
    why: str
    """What it takes, or what is missing."""
    devices: tuple[Device, ...] = ()


_CARDS = Path("/sys/class/infiniband")


def known_transports(cards: Path = _CARDS) -> list[Transport]:
    """All that are known, those that are there first. Starts nothing; loads the engine to see that it loads."""
    found = [Transport("shared memory", is_there=True, why="processes of one user on this host")]
    try:
        module = load_engine()
    except ConfigError as error:
        found += [Transport(name, is_there=False, why=str(error)) for name in PROTOCOLS]
    else:
        built = built_protocols(module)
        found += [_transport(name, built, cards) for name in PROTOCOLS]
    return sorted(found, key=lambda transport: not transport.is_there)


def network_cards(cards: Path = _CARDS) -> tuple[Device, ...]:
    """Those for rdma, by name."""
    try:
        folders = sorted(cards.iterdir())
    except OSError:
        return ()
    return tuple(_device(folder) for folder in folders)


def _transport(name: str, built: frozenset[str], cards: Path) -> Transport:
    if name not in built:
        return Transport(name, is_there=False, why="the installed build of Mooncake does not have it")
    if name != "rdma":
        return Transport(name, is_there=True, why="the installed build of Mooncake has it")
    devices = network_cards(cards)
    if not devices:
        return Transport(name, is_there=False, why=f"no network card for it: {cards} is empty")
    if not any("ACTIVE" in device.state for device in devices):
        return Transport(name, is_there=False, why="no network card for it is active", devices=devices)
    return Transport(name, is_there=True, why=f"{len(devices)} network cards", devices=devices)


def _device(folder: Path) -> Device:
    node = _word(folder / "device" / "numa_node")
    port = folder / "ports" / "1"
    return Device(
        folder.name,
        int(node) if node.removeprefix("-").isdigit() else -1,
        _word(port / "state"),
        _word(port / "rate"),
    )


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
