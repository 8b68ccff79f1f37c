"""Attention in parts, in place and over pages equals attention over everything at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.engines.embedded.attention import _attend_plainly, attend, merge
from workmem.engines.embedded.native import NativeKernel, RowPages, load_kernel

DIM = 32


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> torch.Tensor:
    group = query.shape[0] // key.shape[0]
    score = query @ key.repeat_interleave(group, 0).transpose(1, 2) * DIM**-0.5
    if causal:
        rows, columns = score.shape[1:]
        score = score.masked_fill(
            torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1), float("-inf")
        )
    return score.softmax(-1) @ value.repeat_interleave(group, 0)


@pytest.mark.parametrize("function", [attend, _attend_plainly])
@settings(max_examples=40, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 40), max_size=3),
    rows=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_parts_merge_to_the_whole(
    function: type, kv_heads: int, group: int, cuts: list[int], rows: int, seed: int
) -> None:
    """Context cut anywhere plus a causal piece: the log-sum-exp merge is attention over all of it."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(cuts) + rows
    query = torch.randn(kv_heads * group, rows, DIM, generator=generator)
    key = torch.randn(kv_heads, total, DIM, generator=generator)
    value = torch.randn(kv_heads, total, DIM, generator=generator)
    parts, at = [], 0
    for cut in cuts:
        parts.append(
            function(query, key[:, at : at + cut], value[:, at : at + cut], causal=False, scale=DIM**-0.5)
        )
        at += cut
    parts.append(function(query, key[:, at:], value[:, at:], causal=True, scale=DIM**-0.5))
    torch.testing.assert_close(merge(parts), dense(query, key, value, causal=True), atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> NativeKernel:
    found = load_kernel(tmp_path_factory.mktemp("kernel"))
    assert found is not None, "tests need a C compiler (cc)"
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(3, 3, 64), (1, 8, 128), (2, 1, 80), (4, 4, 16)])
def test_the_kernel_reads_pages_in_place(
    kernel: NativeKernel, dtype: torch.dtype, kv_heads: int, group: int, dim: int
) -> None:
    rng = np.random.default_rng(3)
    layers, block = 3, 16
    lengths = np.array([1, 15, 16, 17, 511, 512, 513, 1300], dtype=np.int64)
    counts = -(-lengths // block)
    pages = torch.randn(int(counts.sum()), layers, 2, block, kv_heads, dim).to(dtype)
    order = rng.permutation(len(pages))
    addresses = pages.data_ptr() + order.astype(np.int64) * pages[0].numel() * pages.element_size()
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    query = torch.randn(len(lengths), kv_heads * group, dim)
    layer_bytes = pages[0, 0].numel() * pages.element_size()
    for layer in range(layers):
        got = kernel.attend(
            query,
            RowPages(addresses, first, lengths),
            k_offset=layer * layer_bytes,
            v_offset=layer * layer_bytes + layer_bytes // 2,
            block_tokens=block,
            kv_heads=kv_heads,
            is_bf16=dtype == torch.bfloat16,
            scale=dim**-0.5,
        )
        for row, length in enumerate(lengths):
            mine = torch.from_numpy(order[first[row] : first[row] + counts[row]])
            both = pages[mine, layer].float().transpose(0, 1).reshape(2, -1, kv_heads, dim)[:, :length]
            want = torch.nn.functional.scaled_dot_product_attention(
                query[row].view(1, -1, 1, dim), *both.transpose(1, 2)[:, None], enable_gqa=True
            )[0, :, 0]
            torch.testing.assert_close(got[row], want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(3, 3, 64), (1, 8, 128), (2, 1, 80), (4, 5, 24)])
@pytest.mark.parametrize(("context", "rows"), [(1, 1), (16, 16), (255, 3), (256, 40), (250, 64), (1300, 17)])
def test_a_run_of_rows_reads_its_context_in_place(
    kernel: NativeKernel, dtype: torch.dtype, kv_heads: int, group: int, dim: int, context: int, rows: int
) -> None:
    block, total = 16, context + rows
    count = -(-total // block)
    pages = torch.randn(count, 2, 2, block, kv_heads, dim).to(dtype)
    order = np.random.default_rng(3).permutation(count)
    # What lies behind the last token must not matter, whatever it is.
    pages[order[-1], :, :, total - (count - 1) * block :] = float("nan")
    addresses = pages.data_ptr() + order.astype(np.int64) * pages[0].numel() * pages.element_size()
    query = torch.randn(rows, kv_heads * group, dim)
    layer_bytes = pages[0, 0].numel() * pages.element_size()
    both = pages[torch.from_numpy(order), 1].float().transpose(0, 1).reshape(2, -1, kv_heads, dim)[:, :total]
    key, value = both.transpose(1, 2)
    got = kernel.attend_run(
        query,
        addresses,
        context=context,
        k_offset=layer_bytes,
        v_offset=layer_bytes + layer_bytes // 2,
        block_tokens=block,
        kv_heads=kv_heads,
        is_bf16=dtype == torch.bfloat16,
        scale=DIM**-0.5,
    )
    want = dense(query.transpose(0, 1), key, value, causal=True).transpose(0, 1)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_a_rows_result_does_not_depend_on_its_neighbours(kernel: NativeKernel) -> None:
    pages = torch.randn(80, 1, 2, 16, 2, 64)
    query = torch.randn(5, 4, 64)
    addresses = pages.data_ptr() + np.arange(80, dtype=np.int64) * pages[0].numel() * 4
    first, lengths = np.arange(5, dtype=np.int64) * 16, np.array([200, 3, 256, 77, 129], dtype=np.int64)
    sizes = {
        "k_offset": 0,
        "v_offset": 16 * 2 * 64 * 4,
        "block_tokens": 16,
        "kv_heads": 2,
        "is_bf16": False,
        "scale": 0.125,
    }
    together = kernel.attend(query, RowPages(addresses, first, lengths), **sizes)
    for row in range(5):
        one = slice(row, row + 1)
        alone = kernel.attend(
            query[one].contiguous(),
            RowPages(addresses, first[one].copy(), lengths[one].copy()),
            **sizes,
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_new_tokens_are_stored_as_torch_would_and_attended_to(
    kernel: NativeKernel, dtype: torch.dtype
) -> None:
    lengths = np.array([1, 16, 17, 40], dtype=np.int64)
    first = np.array([0, 1, 2, 4], dtype=np.int64)
    pages = torch.randn(7, 2, 2, 16, 2, 32).to(dtype)
    want = pages.clone()
    addresses = pages.data_ptr() + np.arange(7, dtype=np.int64) * pages[0].numel() * pages.element_size()
    query, key, value = torch.randn(4, 4, 32), torch.randn(4, 2, 32) * 3, torch.randn(4, 2, 32)
    for row, length in enumerate(lengths):
        page, offset = first[row] + (length - 1) // 16, (length - 1) % 16
        want[page, 1, 0, offset], want[page, 1, 1, offset] = key[row].to(dtype), value[row].to(dtype)
    layer_bytes = pages[0, 0].numel() * pages.element_size()
    sizes = {
        "k_offset": layer_bytes,
        "v_offset": layer_bytes + layer_bytes // 2,
        "block_tokens": 16,
        "kv_heads": 2,
        "is_bf16": dtype == torch.bfloat16,
        "scale": 0.2,
    }
    got = kernel.attend(query, RowPages(addresses, first, lengths), new=(key, value), **sizes)
    assert torch.equal(pages, want)
    assert torch.equal(got, kernel.attend(query, RowPages(addresses, first, lengths), **sizes))


@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 64), (8, 4096)])
def test_the_native_norm_is_the_norm(kernel: NativeKernel, rows: int, width: int) -> None:
    x, weight = torch.randn(1, rows, width) * 5, torch.randn(width)
    want = torch.nn.functional.rms_norm(x, (width,), weight, 1e-5)
    torch.testing.assert_close(kernel.rms_norm(x, weight, 1e-5), want, atol=1e-5, rtol=1e-5)


def test_without_a_compiler_there_is_no_kernel_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert load_kernel(tmp_path) is None


def test_a_compiler_that_fails_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/bin/false")
    assert load_kernel(tmp_path) is None
