"""The commands of `workmem store` that read a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table

from workmem.cli.options import ConfigFile, Settings
from workmem.cli.store_folder import FolderPath, console_out, disk_errors, folder_of, keyring_of, progress_bar
from workmem.cli.store_running import show_running
from workmem.config import host_socket, load
from workmem.core.errors import IntegrityError
from workmem.core.units import format_bytes
from workmem.store.host.client import HostStore
from workmem.store.host.place import is_served
from workmem.store.tools import export as exporting
from workmem.store.tools import gc as collecting
from workmem.store.tools import verify as verifying
from workmem.store.tools.folder_view import FolderView, read_folder
from workmem.store.tools.listing import blocks_of, find_chain, find_space, line_of
from workmem.store.tools.running_stat import running_stat
from workmem.store.tools.stat import PREFIX_DIGITS, SegmentStat, SpaceStat, StoreStat, stat_of

AsJson = Annotated[
    bool, Parameter(name="--json", negative=(), help="Print JSON, whole keys and plain bytes.")
]
ShowNames = Annotated[
    bool,
    Parameter(
        negative=(),
        help="Name models, adapters and tenants (their salts) instead of showing digests of them.",
    ),
]
RootPrefix = Annotated[
    str,
    Parameter(
        help="First digits of the namespace's root, as `store stat` shows it; not needed where there is one only."
    ),
]
_SEGMENTS_SHOWN = 20


def stat(
    path: FolderPath = None,
    /,
    *,
    json: AsJson = False,
    show_names: ShowNames = False,
    config: ConfigFile = None,
    sets: Settings = (),
) -> None:
    """Show what a store's folder holds: namespaces, pages, live and dead bytes, the journal.

    Works beside a running store, and shows the moment it was run. Without PATH, and where the host's store is
    served, it is asked for its tiers too: eviction order, quotas, pins, and what more room would have hit.
    """
    with disk_errors():
        found = stat_of(_view(path, config, sets), show_names=show_names)
        socket = host_socket(load(config, sets=sets).config.store.host.socket)
        if path is None and is_served(socket):
            with HostStore(socket) as store:
                found = msgspec.structs.replace(found, running=running_stat(store.gauges()))
    if json:
        _print_json(found)
        return
    console = console_out()
    for line in _summary(found):
        console.print(line, soft_wrap=True)
    console.print(_space_table(found.spaces))
    console.print(_segment_table(found.segments))
    if found.running is not None:
        show_running(console, found.running)


def ls(
    path: FolderPath = None,
    /,
    *,
    root: RootPrefix = "",
    limit: Annotated[int, Parameter(help="Most blocks to list; 0 lists all.")] = 1000,
    json: AsJson = False,
    config: ConfigFile = None,
    sets: Settings = (),
) -> None:
    """List the blocks of a namespace, each behind the one before it."""
    with disk_errors():
        view = _view(path, config, sets)
    space = find_space(view, root)
    lines = [line_of(space, page) for page in blocks_of(space)]
    shown = lines[:limit] if limit else lines
    if json:
        _print_json({"root": space.root.hex(), "blocks": shown, "of": len(lines)})
        return
    table = Table("block", "depth", "tokens", "segment", "offset", "bytes", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for line in shown:
        # Deep blocks would run out of the screen: the indent says "behind the one above" and no more.
        mark = "" if line.depth == 0 else "- "
        table.add_row(
            mark + line.key[:PREFIX_DIGITS],
            str(line.depth),
            str(line.tokens),
            str(line.segment),
            str(line.offset),
            str(line.bytes),
        )
    console = console_out()
    console.print(f"namespace {space.root.hex()[:PREFIX_DIGITS]}, {len(lines)} blocks")
    console.print(table)
    if len(shown) < len(lines):
        console.print(f"... {len(lines) - len(shown)} more; --limit 0 lists all")


def verify(
    path: FolderPath = None, /, *, json: AsJson = False, config: ConfigFile = None, sets: Settings = ()
) -> None:
    """Read every live page, past the page cache where that can be, and check it. Exit code 1 on damage.

    Nothing is changed: the store itself checks what it reads, and takes damaged pages out of service.
    Works beside a running store.
    """
    with disk_errors():
        view = _view(path, config, sets)
        total = sum(page.length for space in view.spaces for page in space.pages.values())
        with progress_bar("reading", total) as bar:
            verdict = verifying.verify(view, on_read=bar.read)
    if json:
        _print_json(verdict)
    else:
        _print_verdict(view, verdict)
    if verdict.damage:
        raise IntegrityError(
            f"{len(verdict.damage)} damaged in {view.path}; a store that opens it serves them as misses, "
            "`workmem store gc` strikes them out"
        )


def gc(path: FolderPath = None, /, *, config: ConfigFile = None, sets: Settings = ()) -> None:
    """Strike out damaged pages, move live ones together, remove dead ones. The store must be stopped.

    A running store does this by itself when it needs the room.
    """
    folder = folder_of(path, config, sets)
    with disk_errors(), progress_bar("checking and moving") as bar:
        done = collecting.collect(
            folder, keyring=keyring_of(config, sets), on_read=bar.read, on_segment=bar.segment
        )
    console = console_out()
    for name, (before, after) in (("segments", done.segment_bytes), ("journal", done.journal_bytes)):
        console.print(f"{name}: {format_bytes(before)} -> {format_bytes(after)}")
    console.print(f"records: {done.records[0]} -> {done.records[1]}")
    if done.damaged:
        console.print(f"[yellow]{done.damaged} damaged pages were struck out[/]")


def export(
    path: FolderPath = None,
    /,
    *,
    out: Annotated[Path, Parameter(help="Name of the two files, with or without an ending.")],
    root: RootPrefix = "",
    key: Annotated[
        str,
        Parameter(
            help="First digits of a block's key: it and the blocks before it are written. All blocks if left out."
        ),
    ] = "",
    show_names: ShowNames = False,
    config: ConfigFile = None,
    sets: Settings = (),
) -> None:
    """Write pages to OUT.npy, and what they are to OUT.json."""
    with disk_errors():
        view = _view(path, config, sets)
        space = find_space(view, root)
        pages = find_chain(space, key) if key else list(blocks_of(space))
        files = exporting.export(view, space, pages, out, show_names=show_names)
    console_out().print(f"{len(pages)} pages in {files[0]}, described in {files[1]}", soft_wrap=True)


def _view(path: Path | None, config: Path | None, sets: tuple[str, ...]) -> FolderView:
    return read_folder(folder_of(path, config, sets), keyring=keyring_of(config, sets))


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def _summary(found: StoreStat) -> list[str]:
    holder = f"open in process {found.holder}" if found.holder else "not open"
    torn = f", {found.torn_bytes} bytes of an unfinished batch" if found.torn_bytes else ""
    pages = (
        f"pages: {found.pages} in {len(found.segments)} segments of {format_bytes(found.segment_bytes)}, "
        f"{format_bytes(found.live_bytes)} live, {format_bytes(found.dead_bytes)} dead"
    )
    journal = (
        f"journal: {format_bytes(found.journal_bytes)}, {found.live_records} records live, "
        f"{found.dead_records} dead{torn}"
    )
    store = f"[bold]{escape(found.path)}[/], store {found.store_id[:PREFIX_DIGITS]}, {holder}"
    return [store, pages, journal]


def _space_table(spaces: list[SpaceStat]) -> Table:
    table = Table(
        "namespace",
        "layout",
        "model",
        "adapter",
        "epoch",
        "tenant",
        "pages",
        "bytes",
        box=None,
        pad_edge=False,
    )
    for space in sorted(spaces, key=lambda space: -space.bytes):
        table.add_row(
            space.root,
            escape(space.layout),
            escape(space.model),
            escape(space.adapter) or "-",
            str(space.epoch),
            escape(space.tenant) or "-",
            str(space.pages),
            format_bytes(space.bytes),
        )
    for column in (4, 6, 7):
        table.columns[column].justify = "right"
    return table


def _segment_table(segments: list[SegmentStat]) -> Table:
    table = Table("segment", "bytes", "live", "dead", "pages", "", box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.justify = "right"
    for segment in segments[:_SEGMENTS_SHOWN]:
        table.add_row(
            str(segment.number),
            format_bytes(segment.bytes),
            format_bytes(segment.live_bytes),
            format_bytes(segment.bytes - segment.live_bytes),
            str(segment.pages),
            f"[yellow]left out: {escape(segment.problem)}[/]" if segment.problem else "",
        )
    if len(segments) > _SEGMENTS_SHOWN:
        table.add_row("...", f"{len(segments) - _SEGMENTS_SHOWN} more; --json shows all")
    return table


def _print_verdict(view: FolderView, verdict: verifying.Verdict) -> None:
    console = console_out()
    left = f"; {verdict.left} left while they were read" if verdict.left else ""
    console.print(
        f"{verdict.pages} of {view.page_count} pages are what was written, "
        f"{format_bytes(verdict.bytes)} read{left}"
    )
    if not verdict.damage:
        return
    table = Table("namespace", "block", "segment", "offset", "damage", box=None, pad_edge=False)
    for damage in verdict.damage:
        place = (str(damage.segment), str(damage.offset)) if damage.segment else ("", "")
        table.add_row(damage.root, damage.key, *place, f"[red]{escape(damage.problem)}[/]")
    console.print(table)
