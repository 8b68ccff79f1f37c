"""Between hosts: Mooncake's transfer engine. The one file that talks to it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from workmem.core.errors import TransferError
from workmem.transfer.contract import Access, Described, Memory, Moved, Outcome, Part
from workmem.transfer.mooncake_library import LATE_S, hush, load_mooncake

PROTOCOLS = {
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


class MooncakeMover:
    """An engine of its own. `protocol` is one that `transports.known_transports` lists as there."""

    settle_s = 30.0
    """After a failure the engine does not say what of the batch is still queued. All its own waits are shorter."""
    drain_s = 120.0
    """A process's last bytes are sent by its kernel after its end, for as long as that tries again."""

    def __init__(
        self, host: str, protocol: str = "tcp", devices: str = "", *, call_bytes: int = 16 * 2**20
    ) -> None:
        """`host` is this host as others reach it; `devices` are network cards, separated by commas.

        Empty is all of them, chosen for each transfer by where the memory lies. Raises ConfigError where Mooncake is not installed, TransferError where it does not start.
        """
        self._call_bytes = call_bytes
        """In one call: what a window that is closed waits for."""
        self.name = f"mooncake {protocol}"
        module = load_engine()
        if protocol not in built_protocols(module):
            # The engine itself takes any word, and moves nothing.
            raise TransferError(
                f"the installed build of Mooncake has no {protocol}; it has {', '.join(sorted(built_protocols(module)))}"
            )
        self._engine = module.TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code:
            raise TransferError(
                f"Mooncake's engine does not start at {host} by {protocol} (it says {code}); "
                "see whether the address is this host's and which transports there are"
            )
        self._segment = f"{host}:{self._engine.get_rpc_port()}"

    def register(self, memory: Memory) -> Described:
        """See `Mover.register`."""
        address, size = _address(memory), len(memory.view)
        code = self._engine.register_memory(address, size, memory.place)
        if code:
            raise TransferError(
                f"Mooncake cannot register {size} bytes (it says {code}); see `ulimit -l` with rdma"
            )
        return Described(self._segment, address, size)

    def unregister(self, memory: Memory) -> None:
        """See `Mover.unregister`."""
        self._engine.unregister_memory(_address(memory))

    def reach(self, region: Described, fd: int, access: Access) -> Described:
        """See `Mover.reach`."""
        del fd, access
        return region

    def move(
        self,
        access: Access,
        target: object,
        start: int,
        memory: Memory,
        parts: Sequence[Part],
        stop: Callable[[], bool],
    ) -> Moved:
        """See `Mover.move`."""
        assert isinstance(target, Described)
        engine, base = self._engine, _address(memory)
        call = engine.batch_transfer_sync_write if access is Access.WRITE else engine.batch_transfer_sync_read
        for some in _calls(parts, self._call_bytes):
            if stop():
                return Moved(Outcome.REFUSED)
            started = time.monotonic()
            code = call(
                target.segment,
                [base + part.here for part in some],
                [target.base + start + part.there for part in some],
                [part.size for part in some],
            )
            if code:
                late = time.monotonic() - started >= LATE_S
                return Moved(Outcome.TIMED_OUT if late else Outcome.FAILED, is_clean=False)
        return Moved(Outcome.DONE)

    def close(self) -> None:
        """See `Mover.close`."""
        del self._engine

    def topology(self) -> str:
        """Which card the engine takes for memory of which place, as its own JSON."""
        return str(self._engine.get_local_topology())


def load_engine() -> ModuleType:
    """Mooncake's engine. Raises ConfigError, saying what to install, where it is not there or does not load."""
    module = load_mooncake("mooncake.engine", "a transfer between hosts")
    hush(module)
    return module


def built_protocols(module: ModuleType) -> frozenset[str]:
    """Those whose class is among the library's names. It has no function that tells."""
    with (
        Path(str(module.__file__)).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as words,
    ):
        return frozenset(
            name for name, kind in PROTOCOLS.items() if words.find(f"{len(kind)}{kind}E".encode()) >= 0
        )


def _address(memory: Memory) -> int:
    return int(np.frombuffer(memory.view, np.uint8).ctypes.data)


def _calls(parts: Sequence[Part], at_most: int) -> Iterable[list[Part]]:
    """Parts in calls of `at_most` bytes; a longer one is cut."""
    some: list[Part] = []
    room = at_most
    for part in parts:
        done = 0
        while done < part.size:
            size = min(room, part.size - done)
            some.append(Part(part.here + done, part.there + done, size))
            done, room = done + size, room - size
            if not room:
                yield some
                some, room = [], at_most
    if some:
        yield some
