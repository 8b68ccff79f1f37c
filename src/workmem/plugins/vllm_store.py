"""How what vLLM loads comes to the host's store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from workmem.config import Config, cache_dir, host_socket, load
from workmem.engines.vllm.launch import MODULE
from workmem.engines.vllm.store_process import ensure_store
from workmem.store.copying import use_native_copy
from workmem.store.host.client import HostStore

log = logging.getLogger("vllm.workmem")


def read_settings(said: Mapping[str, object]) -> Config:
    """Our settings, with those of vLLM's configuration that are dotted paths. Raises ConfigError on a bad one."""
    return load(sets=[f"{path}={value}" for path, value in said.items() if "." in path]).config


def said_of_us(transfer: Any) -> Mapping[str, object]:
    """What vLLM's `KVTransferConfig` says of our connector, which may be one of several; nothing where it is not there."""
    if transfer is None:
        return {}
    said: Mapping[str, Any] = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector_module_path == MODULE:
        return said
    children: Sequence[Mapping[str, Any]] = said.get("connectors") or ()
    return next(
        (
            child.get("kv_connector_extra_config") or {}
            for child in children
            if child.get("kv_connector_module_path") == MODULE
        ),
        {},
    )


def open_store(settings: Config, said: Mapping[str, object], *, starts: bool = True) -> HostStore:
    """A client of the host's store, which is started with what `said` says of it if none is served and `starts`."""
    socket = host_socket(settings.store.host.socket)
    if starts and settings.vllm.start_store:
        wanted = {
            path: str(value)
            for path, value in said.items()
            if path.startswith("store.") and path != "store.host.socket"
        }
        why = ensure_store(socket, wanted, cache_dir() / "run" / "store.log", settings.vllm.start_s)
        if why:
            log.warning("workmem: no store (%s); everything is computed until one is served", why)
    use_native_copy(cache_dir())
    return HostStore(
        socket,
        call_s=settings.store.host.call_s,
        save_queue_pages=settings.store.save_queue_pages,
        attaches=False,
    )
