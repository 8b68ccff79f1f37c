"""The one place that talks to Mooncake: a client of a pool, and its answers told apart."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec

from workmem.store.tiers.mooncake.memory import Span, joined
from workmem.store.tiers.mooncake.objects import PoolObject
from workmem.store.tiers.mooncake.options import MooncakeOptions, segment_bytes
from workmem.store.tiers.mooncake.outcomes import (
    HAS_LEASE,
    NO_MASTER,
    NOT_FOUND,
    GetResult,
    PutResult,
    get_result,
    put_result,
)
from workmem.transfer.mooncake_library import hush, load_mooncake

SCRATCH_BYTES = 16 * 2**20
"""What the client keeps for values that are not in the arena: words of the ledger."""
_PIN_STEP_S = 30
_PIN_MAX_S = 24 * 3600
"""What masters allow, unless they are told otherwise."""
_CONNECT_S = 2.0
_SETUP_S = 15.0


class MasterAwayError(OSError):
    """Nobody answers where the master should be."""


class Wanted(msgspec.Struct, frozen=True, eq=False):
    """Pages of an object, by index, and where they are to go."""

    inside: PoolObject
    indices: tuple[int, ...]
    spans: tuple[Span, ...]


class Link:
    """A client. Every method may be called from any thread, blocks, and lets other threads run meanwhile."""

    def __init__(self, options: MooncakeOptions) -> None:
        """Raises ConfigError where Mooncake is not installed, OSError where there is no master."""
        self._module = load_mooncake("mooncake.store", "$.store.below.tier: mooncake")
        self._segment_bytes = segment_bytes(options)
        self._client = _set_up(self._module, options)
        # Own memory takes a copy, another's a journey, unless the one who reads it next is there.
        self._preferred = options.preferred_segment or (self.segment_name if self._segment_bytes else "")
        self._put_config = self._config()
        self._endpoint = ""
        hush(self._module)

    @property
    def segment_name(self) -> str:
        """What the master calls the memory of this process."""
        return str(self._client.get_hostname())

    # -- memory

    def register(self, address: int, size: int) -> None:
        """Let it read and write there. Raises OSError."""
        code = self._client.register_buffer(address, size)
        if code:
            raise OSError(f"the arena of {size} bytes cannot be registered (Mooncake says {code})")

    def unregister(self, address: int) -> None:
        """It may not any more."""
        self._client.unregister_buffer(address)

    # -- pages

    def put(self, objects: Sequence[PoolObject], spans: Sequence[Sequence[Span]]) -> list[PutResult]:
        """Store objects from the arena. Those STORED are to be looked up with `where`."""
        results = [PutResult.BROKEN] * len(objects)
        by_pin: dict[int, list[int]] = {}
        for at, one in enumerate(objects):
            by_pin.setdefault(_pin_ms(one.pin_s), []).append(at)
        for pin_ms, chosen in by_pin.items():
            some, where = [objects[at] for at in chosen], [spans[at] for at in chosen]
            found = self._put(some, where, pin_ms)
            if pin_ms and set(found) == {PutResult.BROKEN}:
                # The master's longest pin is shorter than ours, which nobody can ask it: better kept unpinned.
                found = self._put(some, where, 0)
            for at, result in zip(chosen, found, strict=True):
                results[at] = result
        return results

    def where(self, objects: Sequence[PoolObject]) -> list[str | None]:
        """Which peer has each, whole; None where it is not, or not yet, there. Raises MasterAwayError."""
        found = self._client.batch_get_replica_desc([one.name for one in objects])
        if objects and not found:
            # Nothing is there, or nobody answered: this tells.
            self.is_there([objects[0].name])
        return [self._peer_of(found.get(one.name, ()), one.size) for one in objects]

    def get_whole(self, wanted: Sequence[Wanted]) -> list[GetResult]:
        """Bring objects of which all pages are wanted."""
        parts = [joined(one.spans) for one in wanted]
        started = time.monotonic()
        codes = self._client.batch_get_into_multi_buffers(
            [one.inside.name for one in wanted],
            [[address for address, _ in part] for part in parts],
            [[size for _, size in part] for part in parts],
        )
        seconds = time.monotonic() - started
        results = [
            get_result(code, one.inside.size, seconds) for code, one in zip(codes, wanted, strict=True)
        ]
        return self._with_others_size(wanted, results)

    def get_some(self, wanted: Sequence[Wanted], base: int) -> list[GetResult]:
        """Bring pages from objects; `base` is where the registered memory begins."""
        started = time.monotonic()
        (codes,) = self._client.get_into_ranges(
            [base],
            [[one.inside.name for one in wanted]],
            [[[address - base for address, _ in one.spans] for one in wanted]],
            [[[one.inside.offsets[index] for index in one.indices] for one in wanted]],
            [[[size for _, size in one.spans] for one in wanted]],
        )
        seconds = time.monotonic() - started
        results = [_result_of_ranges(found, one, seconds) for found, one in zip(codes, wanted, strict=True)]
        return self._with_others_size(wanted, results)

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Have objects go, whoever reads them now. False where the master did not hear of it."""
        codes = self._client.batch_remove(list(names), True)
        return [code in {0, NOT_FOUND, HAS_LEASE} for code in codes]

    def copy_here(self, name: str) -> bool:
        """Begin to copy an object into this process's memory, which takes seconds. False where that cannot be."""
        _, code = self._client.create_copy_task(name, [self.segment_name])
        return code == 0

    def endpoint(self) -> str:
        """What `where` says of an object that lies in this process's memory. Raises MasterAwayError."""
        if not self._endpoint:
            name = f"workmem/1/here/{secrets.token_hex(8)}"
            config = self._config()
            config.preferred_segment = self.segment_name
            if self._client.put(name, b"here", config) == 0:
                self._endpoint = self._peer_of(self._client.get_replica_desc(name), len(b"here")) or ""
                self.remove([name])
        return self._endpoint

    # -- words

    def is_there(self, names: Sequence[str]) -> list[bool]:
        """Which exist. They are kept for a while by that: ask only for what is read next. Raises MasterAwayError."""
        codes = self._client.batch_is_exist(list(names))
        if any(code in NO_MASTER for code in codes):
            raise MasterAwayError("the master of the pool does not answer")
        return [code == 1 for code in codes]

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Small values; empty where there is none."""
        return self._client.get_batch(list(names)) if names else []

    def write(self, name: str, value: bytes) -> bool:
        """Keep a small value. True also where another was there first."""
        return self._client.put(name, value, self._put_config) == 0

    def close(self) -> None:
        """No call may be under way, and none may follow. Takes a second or two."""
        self._client.close()

    def _put(
        self, objects: Sequence[PoolObject], spans: Sequence[Sequence[Span]], pin_ms: int
    ) -> list[PutResult]:
        parts = [joined(pages) for pages in spans]
        config = self._config()
        if any(one.group for one in objects):
            config.group_ids = [one.group for one in objects]
        if pin_ms:
            config.soft_pin_action = self._module.SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = pin_ms
        started = time.monotonic()
        codes = self._client.batch_put_from_multi_buffers(
            [found.name for found in objects],
            [[address for address, _ in part] for part in parts],
            [[size for _, size in part] for part in parts],
            config,
        )
        seconds = time.monotonic() - started
        return [put_result(code, seconds) for code in codes]

    def _config(self) -> Any:
        config = self._module.ReplicateConfig()
        config.preferred_segment = self._preferred
        return config

    def _with_others_size(self, wanted: Sequence[Wanted], results: list[GetResult]) -> list[GetResult]:
        """What is asked of an object behind its end fails as an owner that is dead does, and no peer is to blame for it."""
        dead = [at for at, result in enumerate(results) if result is GetResult.OWNER_DEAD]
        if dead:
            found = self._client.batch_get_replica_desc([wanted[at].inside.name for at in dead])
            for at in dead:
                sizes = _sizes(found.get(wanted[at].inside.name, ()))
                if sizes and wanted[at].inside.size not in sizes:
                    results[at] = GetResult.BROKEN
        return results

    def _peer_of(self, replicas: Sequence[Any], size: int) -> str | None:
        for replica in replicas:
            if replica.status == self._module.ReplicaStatus.COMPLETE and replica.is_memory_replica():
                memory = replica.get_memory_descriptor().buffer_descriptor
                if memory.size == size:
                    return str(memory.transport_endpoint)
        return None


def _pin_ms(pin_s: float) -> int:
    """In steps, so that pages of one batch are put by few calls."""
    if pin_s <= 0:
        return 0
    return 1000 * min(-(-int(min(pin_s, _PIN_MAX_S) + 1) // _PIN_STEP_S) * _PIN_STEP_S, _PIN_MAX_S)


def _sizes(replicas: Sequence[Any]) -> set[int]:
    return {
        int(one.get_memory_descriptor().buffer_descriptor.size) for one in replicas if one.is_memory_replica()
    }


def _result_of_ranges(codes: Sequence[int], one: Wanted, seconds: float) -> GetResult:
    for code, (_, size) in zip(codes, one.spans, strict=True):
        found = get_result(code, size, seconds)
        if found is not GetResult.ARRIVED:
            return found
    return GetResult.ARRIVED


def _set_up(module: ModuleType, options: MooncakeOptions) -> Any:
    """A client that has joined. Raises OSError."""
    if "://" not in options.master:
        _reach(options.master)
    client = module.MooncakeDistributedStore()
    codes: list[int] = []

    def join() -> None:
        codes.append(
            client.setup(
                options.host,
                "P2PHANDSHAKE",
                segment_bytes(options),
                SCRATCH_BYTES,
                options.protocol,
                options.devices,
                options.master,
                tenant_id=options.tenant,
            )
        )

    # Without a master that answers it would try for minutes.
    thread = threading.Thread(target=join, name="workmem-mooncake-setup", daemon=True)
    thread.start()
    thread.join(_SETUP_S)
    if codes != [0]:
        said = f"Mooncake says {codes[0]}" if codes else f"not within {_SETUP_S:g} s"
        raise OSError(
            f"cannot join the pool of {options.master} as {options.host} by {options.protocol}: {said}; see whether "
            "host is an address of this host, and whether it has cards for rdma or memory for segment"
        )
    return client


def _reach(master: str) -> None:
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise MasterAwayError(f"no master at {master} ({error}); start one with mooncake_master") from error
