"""2 MiB O_DIRECT reads and writes: threads with preadv and pwritev, as the ssd tier makes them, beside io_uring.

    python bench/io_uring.py [--folder DISK] [--seconds 1] [--out FILE]

Both keep as many requests under way, on one file and out of the same memory; slices of each alternate, and a ratio is
that of two neighbours. The ring is driven by its system calls, from one thread: what no binding could be faster than.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from harness import environment, spread, write_result

REQUEST = 2 << 20
FILE_BYTES = 512 << 20
DEPTHS = (1, 2, 4, 8)
SLICES = 5
_SETUP, _ENTER = 425, 426
_RING, _ENTRIES = 0, 0x10000000
_READ, _WRITE, _GETEVENTS, _SINGLE_MMAP = 22, 23, 1, 1
_libc = ctypes.CDLL(None, use_errno=True)


class Ring:
    """An io_uring of one thread: at most `depth` requests are under way."""

    def __init__(self, depth: int) -> None:
        params = bytearray(120)
        self._fd = _call(_SETUP, depth, (ctypes.c_char * 120).from_buffer(params))
        entries, completions, _, _, _, features = struct.unpack_from("<6I", params)
        if not features & _SINGLE_MMAP:
            raise OSError("this kernel maps the two rings apart")
        self._sq = struct.unpack_from("<7I", params, 40)
        self._cq = struct.unpack_from("<7I", params, 80)
        length = max(self._sq[6] + 4 * entries, self._cq[5] + 16 * completions)
        self._ring = mmap.mmap(self._fd, length, mmap.MAP_SHARED, offset=_RING)
        self._entries = mmap.mmap(self._fd, 64 * entries, mmap.MAP_SHARED, offset=_ENTRIES)

    def put(self, opcode: int, fd: int, address: int, offset: int, tag: int) -> None:
        """Queue one request; `enter` tells the kernel."""
        tail, mask = self._word(self._sq[1]), self._word(self._sq[2])
        index = tail & mask
        entry = struct.pack("<BBHiQQIIQ24x", opcode, 0, 0, fd, offset, address, REQUEST, 0, tag)
        self._entries[64 * index : 64 * index + 64] = entry
        struct.pack_into("<I", self._ring, self._sq[6] + 4 * index, index)
        struct.pack_into("<I", self._ring, self._sq[1], tail + 1 & 0xFFFFFFFF)

    def enter(self, queued: int, awaited: int) -> None:
        """Submit what was put, and wait for so many to end."""
        _call(_ENTER, self._fd, queued, awaited, _GETEVENTS, None, 0)

    def ended(self) -> list[int]:
        """Tags of the requests that have ended since. Raises OSError where one was not whole."""
        head, tail, mask = (self._word(self._cq[i]) for i in range(3))
        tags: list[int] = []
        while head != tail:
            tag, result = struct.unpack_from("<Qi", self._ring, self._cq[5] + 16 * (head & mask))
            if result != REQUEST:
                raise OSError(-result, f"a transfer ended with {result}")
            tags.append(tag)
            head = head + 1 & 0xFFFFFFFF
        struct.pack_into("<I", self._ring, self._cq[0], head)
        return tags

    def close(self) -> None:
        """Give it back."""
        self._entries.close()
        self._ring.close()
        os.close(self._fd)

    def _word(self, at: int) -> int:
        return struct.unpack_from("<I", self._ring, at)[0]


def _call(number: int, *arguments: Any) -> int:
    found = _libc.syscall(number, *arguments)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return found


class File:
    """What is read and written: neither sparse nor zero."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        path.unlink()
        self.areas = [mmap.mmap(-1, REQUEST) for _ in range(max(DEPTHS))]
        for area in self.areas:
            area.write(os.urandom(REQUEST))
        for offset in range(0, FILE_BYTES, REQUEST):
            os.pwritev(self.fd, [self.areas[0]], offset)
        os.fsync(self.fd)
        self._turns = count()

    def offset(self) -> int:
        """Of the next request."""
        return next(self._turns) * REQUEST % FILE_BYTES

    def by_threads(self, depth: int, seconds: float, *, writes: bool) -> int:
        """A thread for each request under way. Returns bytes moved."""
        call = os.pwritev if writes else os.preadv
        moved = [0] * depth
        until = time.perf_counter() + seconds

        def work(index: int) -> None:
            while time.perf_counter() < until:
                moved[index] += call(self.fd, [self.areas[index]], self.offset())

        workers = [threading.Thread(target=work, args=(index,)) for index in range(depth)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(moved)

    def by_ring(self, depth: int, seconds: float, *, writes: bool) -> int:
        """One thread and a ring. Returns bytes moved."""
        ring, opcode = Ring(depth), _WRITE if writes else _READ
        places = [ctypes.addressof(ctypes.c_char.from_buffer(area)) for area in self.areas[:depth]]
        until, moved, free = time.perf_counter() + seconds, 0, list(range(depth))
        under_way = 0
        while under_way or free:
            for index in free:
                ring.put(opcode, self.fd, places[index], self.offset(), index)
            ring.enter(len(free), 1)
            under_way += len(free)
            free = ring.ended()
            under_way -= len(free)
            moved += REQUEST * len(free)
            if time.perf_counter() >= until:
                free = []
        ring.close()
        return moved


def measured(move: Callable[..., int], depth: int, seconds: float, *, writes: bool) -> tuple[float, float]:
    """Bytes per second, and seconds of processor per gigabyte."""
    begin, used = time.perf_counter(), time.process_time()
    moved = move(depth, seconds, writes=writes)
    return moved / (time.perf_counter() - begin), 1e9 * (time.process_time() - used) / moved


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="disk to use")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one slice")
    parser.add_argument("--out", type=Path, help="result file")
    words = parser.parse_args()
    file = File(words.folder / f"workmem-io-uring-{os.getpid()}")
    rows = []
    for writes in (False, True):
        for depth in DEPTHS:
            pairs = []
            for turn in range(SLICES):
                order = (file.by_threads, file.by_ring) if turn % 2 == 0 else (file.by_ring, file.by_threads)
                found = {move.__name__: measured(move, depth, words.seconds, writes=writes) for move in order}
                pairs.append((found["by_threads"], found["by_ring"]))
            row = {
                "op": "write" if writes else "read",
                "depth": depth,
                "threads_bytes_per_s": spread([threads[0] for threads, _ in pairs]),
                "ring_bytes_per_s": spread([ring[0] for _, ring in pairs]),
                "ring_over_threads": spread([ring[0] / threads[0] for threads, ring in pairs]),
                "threads_cpu_s_per_gb": spread([threads[1] for threads, _ in pairs]),
                "ring_cpu_s_per_gb": spread([ring[1] for _, ring in pairs]),
            }
            rows.append(row)
            print(
                f"{row['op']} x{depth}: threads {row['threads_bytes_per_s']['median'] / 1e9:.2f} GB/s, "
                f"ring {row['ring_bytes_per_s']['median'] / 1e9:.2f} GB/s, "
                f"ratio {row['ring_over_threads']['median']:.2f} "
                f"({row['ring_over_threads']['min']:.2f} to {row['ring_over_threads']['max']:.2f}); "
                f"processor per GB {row['threads_cpu_s_per_gb']['median']:.3f} s and "
                f"{row['ring_cpu_s_per_gb']['median']:.3f} s",
                flush=True,
            )
    if words.out:
        write_result(words.out, {"bench": "io_uring", "machine": environment(), "rows": rows})
    else:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
