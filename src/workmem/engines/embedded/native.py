"""Builds and binds `paged_attention.c` and `decode_step.c`. Where there is no C compiler, torch does the same work slower.

The library leaves OpenMP's symbols open and binds to the runtime torch has loaded: two runtimes in one process would
fight over the cores.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from workmem.store.native_build import Library, build_library, find_compiler

_LOG = logging.getLogger(__name__)
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11")
_EXACT_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_HERE = Path(__file__).parent
_SOURCES = {
    _HERE / "paged_attention.c": ("-ffast-math",),
    # Neither -ffast-math nor contraction: the order and rounding of their sums is a promise.
    _HERE / "dots.c": _EXACT_FLAGS,
    _HERE / "decode_step.c": _EXACT_FLAGS,
}
_LIBRARY = Library("kernels", _FLAGS, _SOURCES, headers=(_HERE / "kernels.h",))
SPLIT_TOKENS = 256
RUN_QUERIES_MAX = 512
_HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14


class PlaceInPage(TypedDict):
    """Keywords of both kernels: byte offsets of a layer's K and V in a page, and how they are stored."""

    k_offset: int
    v_offset: int
    block_tokens: int
    kv_heads: int
    is_bf16: bool


class RowPages:
    """Where the KV of each query row lies; made once per step and good for all its layers.

    `pages` holds page addresses (int64), row r's from `first_page[r]` on, and `lengths` its tokens, all
    int64. Whoever makes it keeps the pages in place while it is used.
    """

    def __init__(self, pages: np.ndarray, first_page: np.ndarray, lengths: np.ndarray) -> None:
        splits = -(-lengths // SPLIT_TOKENS)
        first_split = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(splits[:-1], out=first_split[1:])
        self.splits_total = int(splits.sum())
        # Held, because the addresses below are only good while they live.
        self._arrays = (pages, first_page, lengths, first_split)
        self.addresses = tuple(array.ctypes.data for array in self._arrays)


class NativeKernel:
    """The compiled functions. CPU tensors only."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, i64, i32, f32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
        self._attention = library.workmem_paged_attention
        self._attention.argtypes = [pointer] * 9 + [i64] * 4 + [i32] * 5 + [f32, i32]
        self._attention.restype = i32
        self._run = library.workmem_paged_attention_run
        self._run.argtypes = [pointer] * 4 + [i64] * 4 + [i32] * 5 + [f32, i32]
        self._run.restype = i32
        self._rms_norm = library.workmem_rms_norm
        self._rms_norm.argtypes = [pointer] * 3 + [i64] * 2 + [f32]
        self._rms_norm.restype = None
        self._decode = library.workmem_decode
        self._decode.argtypes = [pointer, pointer, i64, i64]
        self._decode.restype = i32
        self._scratch = torch.empty(0)

    def decode(self, model: ctypes.Structure, step: ctypes.Structure, first: int, last: int) -> None:
        """Layers [first, last) of a decode step; see `decode_step.c` for the structures."""
        if self._decode(ctypes.byref(model), ctypes.byref(step), first, last) != 0:
            raise ValueError("the decode kernel does not support a model of these sizes, or as many rows")

    def attend(
        self,
        query: torch.Tensor,
        where: RowPages,
        *,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        k_offset: int,
        v_offset: int,
        block_tokens: int,
        kv_heads: int,
        is_bf16: bool,
        scale: float,
    ) -> torch.Tensor:
        """Attention output, fp32 [rows, q heads, dim], of `query` of the same shape, contiguous.

        `new` K and V, fp32 [rows, kv heads, dim] and contiguous, are stored as each row's last token first.
        """
        rows, heads, dim = query.shape
        floats = where.splits_total * heads * (dim + 2)
        if self._scratch.numel() < floats:
            self._scratch = torch.empty(floats)
        out = torch.empty_like(query)
        key, value = (new[0].data_ptr(), new[1].data_ptr()) if new is not None else (None, None)
        pages, first_page, lengths, first_split = where.addresses
        status = self._attention(
            query.data_ptr(), key, value, out.data_ptr(), pages, first_page, lengths, first_split,
            self._scratch.data_ptr(), rows, where.splits_total, k_offset, v_offset, block_tokens,
            kv_heads, heads // kv_heads, dim, int(is_bf16), scale, torch.get_num_threads(),
        )  # fmt: skip
        if status != 0:
            group = heads // kv_heads
            raise ValueError(
                f"paged attention kernel does not support group {group}, dim {dim}, block {block_tokens}"
            )
        return out

    def attend_run(
        self,
        query: torch.Tensor,
        pages: np.ndarray,
        *,
        context: int,
        k_offset: int,
        v_offset: int,
        block_tokens: int,
        kv_heads: int,
        is_bf16: bool,
        scale: float,
    ) -> torch.Tensor:
        """Attention of a run of rows of one request at positions `context`, `context` + 1, ....

        `query` fp32 [rows, q heads, dim], contiguous; the result is shaped alike. `pages` int64, the addresses
        of the pages from token 0 on; the rows' own K and V are already in them.
        """
        rows, heads, dim = query.shape
        floats = -(-(context + rows) // SPLIT_TOKENS) * rows * heads * (dim + 2)
        if self._scratch.numel() < floats:
            self._scratch = torch.empty(floats)
        out = torch.empty_like(query)
        status = self._run(
            query.data_ptr(), out.data_ptr(), pages.ctypes.data, self._scratch.data_ptr(), rows, context,
            k_offset, v_offset, block_tokens, kv_heads, heads // kv_heads, dim, int(is_bf16), scale,
            torch.get_num_threads(),
        )  # fmt: skip
        if status != 0:
            raise ValueError(
                f"paged attention kernel does not support {rows} rows of {heads} heads, dim {dim}"
            )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """X / rms(x) * weight over the last dimension; fp32, contiguous."""
        out = torch.empty_like(x)
        width = weight.numel()
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, epsilon)
        return out

    @staticmethod
    def supports(*, kv_heads: int, group: int, dim: int, block_tokens: int) -> bool:
        """Whether sizes fit what is compiled in (see the #defines of the source)."""
        return (
            kv_heads * group <= 128
            and dim <= 256
            and dim % 8 == 0
            and block_tokens <= 64
            and SPLIT_TOKENS % block_tokens == 0
        )

    @staticmethod
    def run_rows_max(*, group: int, block_tokens: int) -> int:
        """Most rows of `attend_run`; 0 where it cannot read such blocks."""
        return RUN_QUERIES_MAX // group if block_tokens % 16 == 0 else 0


def load_kernel(cache_dir: Path) -> NativeKernel | None:
    """The kernel, compiled on first use (about a second); None, with a log line, where it cannot be built."""
    compiler = find_compiler()
    if compiler is None:
        _LOG.info("no C compiler found: attention runs on torch operators, slower")
        return None
    try:
        library = build_library(compiler, _LIBRARY, cache_dir)
        openmp = _loaded_openmp()
        if openmp is not None:
            ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        return NativeKernel(ctypes.CDLL(str(library)))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _LOG.warning("native attention could not be built (%s): torch operators are used, slower", error)
        return None


def advise_huge_pages(address: int, length: int) -> None:
    """Ask for huge pages behind a range of untouched memory; a system that has none goes on without."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        start = -(-address // _HUGE_BYTES) * _HUGE_BYTES
        if length > 2 * _HUGE_BYTES:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + length - start), _MADV_HUGEPAGE)
    except (OSError, AttributeError):
        _LOG.debug("no madvise on this system")


def _loaded_openmp() -> str | None:
    """Path of the OpenMP runtime that torch brought into this process."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    found = sorted(path for path in paths if any(name in path for name in ("libgomp", "libomp", "libiomp")))
    home = str(Path(torch.__file__).parent)
    own = [path for path in found if path.startswith(home)]
    return (own or found or [None])[0]
