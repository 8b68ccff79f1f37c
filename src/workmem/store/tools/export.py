"""Pages as a file that numpy reads, with a description beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from workmem.core.errors import ConfigError
from workmem.core.layout import KVLayout
from workmem.store.device import BlockDevice
from workmem.store.tiers.journal_records import PutEntry
from workmem.store.tools.folder_view import FolderView, SpaceView
from workmem.store.tools.pages import PageReader
from workmem.store.tools.stat import description

_DTYPES = {"fp32": np.dtype("<f4"), "bf16": np.dtype("<u2")}
"""numpy has no bfloat16: its bits are exported as they are."""
_HOW = {
    "bf16": "bits of bfloat16: (numpy.load(file).astype('uint32') << 16).view('float32') gives the values",
    "bytes": "bytes of each page as they are stored",
}


def export(
    view: FolderView,
    space: SpaceView,
    pages: Sequence[PutEntry],
    target: Path,
    *,
    show_names: bool,
    device: BlockDevice | None = None,
) -> tuple[Path, Path]:
    """Write `pages` to `target` with `.npy`, and what they are to the same name with `.json`; returns both.

    Memory is that of one page. Raises IntegrityError at the first page that is damaged, OSError where disks
    fail, ConfigError where there is nothing to export; files are then not left behind.
    """
    if not pages:
        raise ConfigError(f"namespace {space.root.hex()[:12]} has no pages to export")
    layout = space.namespace.layout
    array_file, description_file = target.with_suffix(".npy"), target.with_suffix(".json")
    try:
        blocks = _write_array(array_file, view, space, pages, device)
        shape, _, meaning = _array_of(layout)
        about = {
            "file": array_file.name,
            "dtype": layout.dtype,
            "meaning": meaning,
            "axes": ["block", "layer", "key or value", "token", "head", "dim"][: 1 + len(shape)],
            "root": space.root.hex(),
            "namespace": description(space.namespace, show_names=show_names),
            "blocks": blocks,
        }
        description_file.write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
    except BaseException:
        array_file.unlink(missing_ok=True)
        description_file.unlink(missing_ok=True)
        raise
    return array_file, description_file


def _write_array(
    target: Path, view: FolderView, space: SpaceView, pages: Sequence[PutEntry], device: BlockDevice | None
) -> list[dict[str, object]]:
    """Write the array and return what its blocks are."""
    shape, dtype, _ = _array_of(space.namespace.layout)
    array = np.lib.format.open_memmap(target, "w+", dtype, (len(pages), *shape))
    blocks: list[dict[str, object]] = []
    with PageReader(view, device) as reader:
        for index, page in enumerate(pages):
            key = page.key.hex()
            header, payload = reader.page(space, page)
            array[index] = np.frombuffer(payload, dtype).reshape(shape)
            blocks.append(
                {"key": key, "parent": page.parent.hex(), "depth": page.depth, "tokens": header.tokens}
            )
    array.flush()
    return blocks


def _array_of(layout: KVLayout) -> tuple[tuple[int, ...], np.dtype[np.generic], str]:
    """Shape and type of a page, and how to read the values."""
    if layout.page_order != "LKNHD" or layout.quantization != "none" or layout.dtype not in _DTYPES:
        return (layout.page_bytes,), np.dtype("u1"), _HOW["bytes"]
    shape = (layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    return shape, _DTYPES[layout.dtype], _HOW.get(layout.dtype, "values as they are")
