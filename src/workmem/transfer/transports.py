"""Which ways bytes can go from this host, and why not the others: for a doctor to list."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import mmap
from pathlib import Path
from typing import NamedTuple

from workmem.core.errors import ConfigError
from workmem.transfer.mooncake_engine import load_engine


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


_CLASSES = {
    "tcp": "TcpTransport",
    "rdma": "RdmaTransport",
    "nvlink": "NvlinkTransport",
    "nvlink_intra": "IntraNodeNvlinkTransport",
    "nvmeof": "NVMeoFTransport",
    "cxl": "CxlTransport",
    "efa": "EfaTransport",
    "hip": "HipTransport",
    "ascend": "HcclTransport",
}
"""By the engine's name for it, the class that an engine built with it has."""
_CARDS = Path("/sys/class/infiniband")


def known_transports(cards: Path = _CARDS) -> list[Transport]:
    """All that are known, those that are there first. Starts nothing; loads the engine to see that it loads."""
    found = [Transport("shared memory", is_there=True, why="processes of one user on this host")]
    try:
        load_engine()
    except ConfigError as error:
        found += [Transport(name, is_there=False, why=str(error)) for name in _CLASSES]
    else:
        built = _built_in(Path(str(_found().origin)))
        found += [_transport(name, built, cards) for name in _CLASSES]
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


def _built_in(library: Path) -> frozenset[str]:
    """Transports whose class is among the library's names. It has no function that tells."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as words:
        return frozenset(
            name for name, kind in _CLASSES.items() if words.find(f"{len(kind)}{kind}E".encode()) >= 0
        )


def _found() -> importlib.machinery.ModuleSpec:
    spec = importlib.util.find_spec("mooncake.engine")
    assert spec is not None
    return spec


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
