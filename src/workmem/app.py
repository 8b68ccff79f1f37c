"""Composition root: from settings to a wired server, and back down in reverse order."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.applications import Starlette

from workmem.config import Config, host_socket
from workmem.core.errors import ConfigError, TransferError
from workmem.core.events import EventSink
from workmem.core.units import format_bytes, parse_bytes
from workmem.engines.embedded.prepare import prepare
from workmem.gateway.app import build_app
from workmem.gateway.metrics import Metrics
from workmem.gateway.upstream import build_upstream_app
from workmem.index.history import PromptHistory
from workmem.store.codecs.settings import page_codec
from workmem.store.config import StoreConfig
from workmem.store.contract import SteeredStore
from workmem.store.copying import use_native_copy
from workmem.store.host.client import HostStore
from workmem.store.host.place import is_served
from workmem.store.host.server import HostServer
from workmem.store.host.session import HostLimits
from workmem.store.store import Store

if TYPE_CHECKING:
    from workmem.engines.embedded.engine import EmbeddedEngine


class Progress(Protocol):
    """Hears of each step of a start. A step lasts from the end of the one before."""

    def begin(self, step: str) -> None:
        """Hear what is being done."""
        ...

    def end(self, result: str) -> None:
        """Hear how the step ended."""
        ...

    def note(self, text: str) -> None:
        """Hear something a person may want to know."""
        ...


@contextmanager
def open_app(config: Config, *, cache_dir: Path, progress: Progress) -> Generator[Starlette]:
    """Start what `config` asks for and yield the application; stop it all, last started first, at the end.

    Blocks for seconds. Raises ConfigError where a setting cannot be met; what was started by then is
    stopped. With `upstream.urls` neither an engine nor a store is started, and torch is not loaded.
    """
    if config.upstream.urls:
        yield build_upstream_app(config.upstream, config.server, prompt=config.prompt)
        return
    gauges = _Gauges()
    metrics = Metrics(gauges)
    with ExitStack() as stack:
        # Found first: a wrong name is then told before memory is taken for it.
        progress.begin("looking for the model")
        folder = prepare(config.engine.model, cache_dir, progress.begin)
        # Before the store and the engine, which ask for it as they open.
        use_native_copy(cache_dir)
        store = _open_store(config.store, cache_dir, metrics.events, progress)
        stack.callback(store.close)
        gauges.sources.append(store)
        engine = _open_engine(config, store, metrics.events, folder, cache_dir, progress)
        # The server closes the engine on its event loop as it stops; this is for a start that fails.
        stack.callback(engine.stop)
        gauges.sources.append(engine)
        history = PromptHistory(prompts_max=config.server.explain_prompts_max)
        yield build_app(
            engine,
            config.server,
            history=history,
            metrics=metrics,
            purge=store.purge,
            prompt=config.prompt,
        )


@contextmanager
def open_host(
    config: StoreConfig, *, cache_dir: Path, sink: EventSink, progress: Progress
) -> Generator[HostServer]:
    """Serve a store to the processes of this host until the end.

    Raises ConfigError where the store cannot be opened, or the socket is taken or open to other users.
    """
    if not page_codec(config).exact:
        raise ConfigError(
            f"$.store.ssd.compression: {config.ssd.compression!r} rounds pages, and whoever attaches to the "
            "host's store asks for exact ones; choose off or zstd here"
        )
    path = host_socket(config.host.socket)
    use_native_copy(cache_dir)
    limits = HostLimits(config.host.lease_s, config.host.reservation_s, config.host.connections_max)
    with (
        _own_store(config, cache_dir, sink, progress) as store,
        HostServer(store, path, limits, sink) as server,
    ):
        yield server


def _open_store(config: StoreConfig, cache_dir: Path, sink: EventSink, progress: Progress) -> SteeredStore:
    host = config.host
    path = host_socket(host.socket)
    is_required = host.attach == "require"
    if host.attach == "never" or not (is_required or (config.ssd.enabled and is_served(path))):
        return _own_store(config, cache_dir, sink, progress)
    progress.begin("attaching to the host's store")
    try:
        store = HostStore(
            path,
            sink,
            call_s=host.call_s,
            save_queue_pages=config.save_queue_pages,
            of_folder=None if is_required else _ssd_folder(config, cache_dir),
        )
    except TransferError as error:
        if is_required:
            raise ConfigError(
                f"$.store.host.attach: {error}; run workmem store serve, or set it to auto or never"
            ) from error
        progress.note(f"not attached to the host's store ({error}); opening one of our own")
        return _own_store(config, cache_dir, sink, progress)
    progress.end(f"attached to the host's store at {path}: dram {format_bytes(store.dram_capacity_bytes())}")
    return store


def _own_store(config: StoreConfig, cache_dir: Path, sink: EventSink, progress: Progress) -> Store:
    progress.begin("opening the store")
    ssd = msgspec.structs.replace(config.ssd, path=str(_ssd_folder(config, cache_dir)))
    store = Store(msgspec.structs.replace(config, ssd=ssd), sink)
    tiers = f"dram {format_bytes(parse_bytes(config.dram.bytes))}"
    if store.ssd_problem:
        tiers += f"; ssd {ssd.path} {store.ssd_problem}"
    elif config.below.tier != "ssd":
        tiers += f"; below it {config.below.tier}"
    elif ssd.enabled:
        blocks = int(store.gauges()["store_ssd_pages"])
        tiers += f", ssd {ssd.path} with {blocks} blocks from before"
    progress.end(f"store opened: {tiers}")
    return store


def _ssd_folder(config: StoreConfig, cache_dir: Path) -> Path:
    return Path(config.ssd.path or cache_dir / "store").expanduser()


def _open_engine(
    config: Config, store: SteeredStore, sink: EventSink, folder: Path, cache_dir: Path, progress: Progress
) -> EmbeddedEngine:
    progress.begin("loading torch")
    # Here and not above: torch takes seconds to load, and upstream mode runs without it.
    from workmem.engines.embedded.engine import EmbeddedEngine  # noqa: PLC0415

    progress.begin(f"loading {folder.name}")
    engine = EmbeddedEngine.open(config.engine, store, folder=folder, cache_dir=cache_dir, sink=sink)
    info = engine.info
    progress.end(f"model loaded: {info.name}, {info.dtype}, context of {info.max_context} tokens")
    for note in engine.notes:
        progress.note(note)
    return engine


class _Reads(Protocol):
    def gauges(self) -> dict[str, float]: ...


class _Gauges:
    """The current readings of all parts as one; parts join as they start."""

    def __init__(self) -> None:
        self.sources: list[_Reads] = []

    def __call__(self) -> dict[str, float]:
        return {name: value for source in self.sources for name, value in source.gauges().items()}
