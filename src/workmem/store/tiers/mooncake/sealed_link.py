"""A link under a key: all that a store puts into the pool is sealed, its names hidden, and what does not open is no page.

It stands in a `Link`'s place, so that whoever puts, gets, moves or tells need not know. Pages are sealed from the arena into scratch
memory and opened from there into the arena: no further copy, and the engine sees nothing but scratch.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from workmem.core.errors import IntegrityError
from workmem.store.codecs.pool_sealing import SEAL_BYTES, PoolCipher
from workmem.store.tiers.mooncake.link import Link, Wanted
from workmem.store.tiers.mooncake.memory import Span
from workmem.store.tiers.mooncake.objects import PoolObject, prefix
from workmem.store.tiers.mooncake.outcomes import GetResult, PutResult

log = logging.getLogger(__name__)

SCRATCH_BYTES = 4 * 2**20
"""Of each thread that puts or gets; more only where a single object takes more."""

_Call = Callable[[Sequence[Wanted], int], list[GetResult]]


class SealedLink:
    """See `Link`. At most `threads` threads may put or get at a time; one more waits. `release` when none does."""

    def __init__(self, link: Link, cipher: PoolCipher, pool: str, threads: int) -> None:
        self._link = link
        self._cipher = cipher
        self._prefix = f"{prefix(pool)}sealed/{cipher.key_id.hex()}/"
        self._scratches = _Scratches(link, threads)

    def register(self, address: int, size: int) -> None:
        """See `Link.register`. Nothing: the engine is shown scratch memory only."""

    def unregister(self, address: int) -> None:
        """See `Link.unregister`."""

    def release(self) -> None:
        """Let go of the scratch memory."""
        self._scratches.release()

    # -- pages

    def put(self, objects: Sequence[PoolObject], spans: Sequence[Sequence[Span]]) -> list[PutResult]:
        """See `Link.put`."""
        sealed = [self._sealed(one) for one in objects]
        results: list[PutResult] = []
        with self._scratches.lent(max((one.size for one in sealed), default=0)) as scratch:
            for first, end in _chunks([one.size for one in sealed], scratch.size):
                at, parts = 0, list[list[Span]]()
                for one, pages in zip(sealed[first:end], spans[first:end], strict=True):
                    self._seal(one, pages, scratch, at)
                    parts.append([(scratch.address + at, one.size)])
                    at += one.size
                results += self._link.put(sealed[first:end], parts)
        return results

    def where(self, objects: Sequence[PoolObject]) -> list[str | None]:
        """See `Link.where`."""
        return self._link.where([self._sealed(one) for one in objects])

    def get_whole(self, wanted: Sequence[Wanted]) -> list[GetResult]:
        """See `Link.get_whole`."""
        return self._get(wanted, lambda asked, _: self._link.get_whole(asked))

    def get_some(self, wanted: Sequence[Wanted], base: int) -> list[GetResult]:
        """See `Link.get_some`."""
        del base
        return self._get(wanted, self._link.get_some)

    def remove(self, names: Sequence[str]) -> list[bool]:
        """See `Link.remove`."""
        return self._link.remove([self.name(name) for name in names])

    def copy_here(self, name: str) -> bool:
        """See `Link.copy_here`."""
        return self._link.copy_here(self.name(name))

    def endpoint(self) -> str:
        """See `Link.endpoint`."""
        return self._link.endpoint()

    # -- words

    def is_there(self, names: Sequence[str]) -> list[bool]:
        """See `Link.is_there`."""
        return self._link.is_there([self.name(name) for name in names])

    def read(self, names: Sequence[str]) -> list[bytes]:
        """See `Link.read`. Empty also where what is there does not open."""
        hidden = [self.name(name) for name in names]
        return [self._opened(*pair) for pair in zip(hidden, self._link.read(hidden), strict=True)]

    def write(self, name: str, value: bytes) -> bool:
        """See `Link.write`."""
        hidden = self.name(name)
        return self._link.write(hidden, self._cipher.seal_word(hidden, value))

    def name(self, plain: str) -> str:
        """What the pool calls it."""
        return self._prefix + self._cipher.name(plain)

    # --

    def _sealed(self, one: PoolObject) -> PoolObject:
        group = self._cipher.name(one.group) if one.group else ""
        return msgspec.structs.replace(one, name=self.name(one.name), group=group, seal_bytes=SEAL_BYTES)

    def _opened(self, hidden: str, value: bytes) -> bytes:
        if not value:
            return b""
        try:
            return self._cipher.open_word(hidden, value)
        except IntegrityError as error:
            log.warning("a word in the pool is not believed: %s", error)
            return b""

    def _seal(self, one: PoolObject, pages: Sequence[Span], scratch: _Scratch, at: int) -> None:
        for index, span in enumerate(pages):
            with _view(span) as plain, scratch.view(at, span[1] + SEAL_BYTES) as into:
                self._cipher.seal_page(one.name, index, plain, into)
            at += span[1] + SEAL_BYTES

    def _get(self, wanted: Sequence[Wanted], call: _Call) -> list[GetResult]:
        sizes = [sum(size + SEAL_BYTES for _, size in one.spans) for one in wanted]
        results: list[GetResult] = []
        with self._scratches.lent(max(sizes, default=0)) as scratch:
            for first, end in _chunks(sizes, scratch.size):
                at, asked = 0, list[Wanted]()
                for one, size in zip(wanted[first:end], sizes[first:end], strict=True):
                    asked.append(self._asked(one, scratch.address + at))
                    at += size
                found = call(asked, scratch.address)
                results += [
                    self._open(one, inside, result, scratch)
                    for one, inside, result in zip(wanted[first:end], asked, found, strict=True)
                ]
        return results

    def _asked(self, one: Wanted, at: int) -> Wanted:
        spans: list[Span] = []
        for _, size in one.spans:
            spans.append((at, size + SEAL_BYTES))
            at += size + SEAL_BYTES
        return Wanted(self._sealed(one.inside), one.indices, tuple(spans))

    def _open(self, one: Wanted, asked: Wanted, result: GetResult, scratch: _Scratch) -> GetResult:
        """Pages that do not open are zeroed, so that whoever checks them finds them corrupt."""
        if result not in {GetResult.ARRIVED, GetResult.BROKEN}:
            return result
        for index, target, (address, size) in zip(one.indices, one.spans, asked.spans, strict=True):
            with _view(target) as into, scratch.view(address - scratch.address, size) as sealed:
                if result is GetResult.BROKEN:
                    # Its size is another, and what was told of it was sealed: somebody changed it.
                    into[:] = bytes(len(into))
                    continue
                try:
                    self._cipher.open_page(asked.inside.name, index, sealed, into)
                except IntegrityError as error:
                    log.warning("page %d of %s: %s", index, asked.inside.name, error)
                    result = GetResult.TAMPERED
        return GetResult.TAMPERED if result is GetResult.BROKEN else result


AnyLink = Link | SealedLink


class _Scratch:
    """Memory that the engine knows."""

    def __init__(self, link: Link, size: int) -> None:
        """Raises OSError where it is refused."""
        self.size = size
        self._memory = memoryview(mmap.mmap(-1, size))
        self.address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        link.register(self.address, size)

    def view(self, at: int, size: int) -> memoryview:
        """A part of it."""
        return self._memory[at : at + size]


class _Scratches:
    """As many as there are threads, made when they are needed and kept."""

    def __init__(self, link: Link, count: int) -> None:
        self._link = link
        self._free = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._idle: list[_Scratch] = []

    @contextmanager
    def lent(self, need: int) -> Generator[_Scratch]:
        """One of `need` bytes at least. Raises OSError where the memory is refused."""
        with self._free:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is not None and found.size < need:
                self._link.unregister(found.address)
                found = None
            if found is None:
                found = _Scratch(self._link, max(need, SCRATCH_BYTES))
            try:
                yield found
            finally:
                with self._lock:
                    self._idle.append(found)

    def release(self) -> None:
        """All of them; nobody may have one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for one in idle:
            self._link.unregister(one.address)


def _chunks(sizes: Sequence[int], size_max: int) -> list[tuple[int, int]]:
    """First and end of runs that take no more than `size_max`; one that takes more is alone."""
    found: list[tuple[int, int]] = []
    total = 0
    for index, size in enumerate(sizes):
        if found and total + size <= size_max:
            found[-1] = (found[-1][0], index + 1)
            total += size
        else:
            found.append((index, index + 1))
            total = size
    return found


def _view(span: Span) -> memoryview:
    """Bytes of this process at an address that `span_of` gave."""
    address, size = span
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
