"""`workmem store purge`: take a tenant, a model or an epoch out of a store, running or stopped."""

from __future__ import annotations

import sys
import time
from typing import Annotated

from cyclopts import Parameter

from workmem.cli.options import ConfigFile, Settings
from workmem.cli.store_folder import FolderPath, console_out, disk_errors, folder_of
from workmem.config import host_socket, load
from workmem.core.errors import ConfigError
from workmem.core.units import format_bytes
from workmem.store.host.client import HostStore
from workmem.store.host.place import is_served
from workmem.store.selector import Purged, PurgeSelector
from workmem.store.store import Store
from workmem.store.tools.purge import opened_to_purge

_GONE_S = 600.0
"""Longest that the bytes are waited for: what lies beside them is written again, at the disk's rate."""


def purge(
    path: FolderPath = None,
    /,
    *,
    tenant: Annotated[
        str | None,
        Parameter(help='Name of a tenant, or the digest that `store stat` shows; "" is the one without.'),
    ] = None,
    model: Annotated[str | None, Parameter(help="Fingerprint of a model, or the digest shown.")] = None,
    epoch: Annotated[int | None, Parameter(help="Epoch of the weights.")] = None,
    root: Annotated[str | None, Parameter(help="First digits of a namespace's root, at least 8.")] = None,
    everything: Annotated[bool, Parameter(name="--all", negative=(), help="All namespaces.")] = False,
    yes: Annotated[bool, Parameter(negative=(), help="Do not ask.")] = False,
    config: ConfigFile = None,
    sets: Settings = (),
) -> None:
    """Take out the namespaces that fit every option given: from memory, from the index, then from the disk.

    Asks the host's store where one is served, else opens the folder, which must be stopped. With PATH it is
    that folder. From the first moment none of the blocks is a hit.
    """
    chosen = PurgeSelector(tenant=tenant, model=model, epoch=epoch, root=root, everything=everything)
    settings = load(config, sets=sets).config.store
    socket = host_socket(settings.host.socket)
    with disk_errors():
        if path is None and is_served(socket):
            with HostStore(socket) as store:
                _purge(store, chosen, f"the store served at {socket}", yes=yes)
            return
        folder = folder_of(path, config, sets)
        with opened_to_purge(folder, settings.ssd) as store:
            _purge(store, chosen, str(folder), yes=yes)


def _purge(store: HostStore | Store, chosen: PurgeSelector, where: str, *, yes: bool) -> None:
    found = store.survey(chosen)
    if not found.blocks:
        # Of one whose blocks have all been evicted the journal may still have the name.
        store.purge(chosen)
        console_out().print(f"nothing to purge: no namespace with blocks in {where} fits", soft_wrap=True)
        if not store.flush(_GONE_S):
            console_out().print(
                "[yellow]names of such without blocks are still being taken out of the journal[/]"
            )
        return
    if not yes:
        _ask(f"Purge {_said(found)} from {where}?")
    began = time.monotonic()
    gone = store.purge(chosen)
    took = time.monotonic() - began
    is_erased = store.flush(_GONE_S)
    console_out().print(f"purged {_said(gone)} from {where} in {took:.2f} s", soft_wrap=True)
    took = time.monotonic() - began
    if is_erased:
        console_out().print(f"their bytes are gone from the disk after {took:.2f} s")
    else:
        console_out().print(
            "[yellow]their bytes are still being taken off the disk; they can be no hit any more[/]"
        )


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Nobody is there to ask: say --yes")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was purged")


def _said(taken: Purged) -> str:
    several = "" if taken.namespaces == 1 else "s"
    return f"{taken.blocks} blocks of {taken.namespaces} namespace{several}, {format_bytes(taken.bytes)}"
