"""`workmem store serve`, and engines that attach to it."""

from __future__ import annotations

import functools
import io
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from workmem.app import _open_store
from workmem.cli.main import main
from workmem.core.errors import ConfigError
from workmem.core.events import discard
from workmem.core.layout import Namespace
from workmem.core.outcomes import MissReason, TierName
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.host.client import HostStore
from workmem.store.host.config import HostConfig
from workmem.store.store import Store
from workmem.testing.pages import SMALL, Chain, namespace, page_bytes, read_all
from workmem.testing.process import Place, ask, serving, sources, text
from workmem.testing.tiny_models import build_model
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

CHAIN = Chain(namespace("small"), 4)


def command(folder: Path) -> list[str]:
    settings = {
        "store.host.socket": folder / "store.sock",
        "store.ssd.path": folder / "ssd",
        "store.ssd.bytes": "64MiB",
        "store.dram.bytes": "64MiB",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "workmem", "store", "serve", *words]


@contextmanager
def store_served(folder: Path) -> Generator[subprocess.Popen[str]]:
    """`workmem store serve` on `folder`; ended by SIGTERM unless it has been killed."""
    with subprocess.Popen(command(folder), stderr=subprocess.PIPE, text=True) as server:
        said = []
        for line in server.stderr:
            said.append(line)
            if "listening on " in line:
                break
        else:
            raise RuntimeError("".join(said))
        try:
            yield server
        finally:
            was_killed = server.poll() is not None
            if not was_killed:
                server.send_signal(signal.SIGTERM)
            rest = server.stderr.read()
            code = server.wait(60)
    assert "Traceback" not in rest, rest
    assert was_killed or code == 0, rest


def test_the_store_is_served_until_told_to_stop_and_keeps_what_it_has(tmp_path):
    socket = tmp_path / "store.sock"
    with store_served(tmp_path):
        with HostStore(socket) as client:
            CHAIN.save(client)
            assert read_all(client, CHAIN.root, CHAIN.keys) == 4
        second = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False, timeout=60)
        assert second.returncode == 2
        assert "in use" in second.stderr or "already" in second.stderr
        assert len(second.stderr.splitlines()) < 5
    assert not socket.exists()
    with Store(
        StoreConfig(dram=DramConfig(bytes="1MiB"), ssd=SsdConfig(path=str(tmp_path / "ssd")))
    ) as store:
        store.register(CHAIN.space)
        assert CHAIN.tiers(store) == (TierName.SSD,) * 4


def workmem(*words: str, tmp_path: Path, socket: Path | None = None) -> int:
    place = ["--set", f"store.host.socket={socket or tmp_path / 'store.sock'}"]
    return main(["store", *words, *place])


def test_purge_takes_a_tenant_out_of_the_served_store(host, capsys, monkeypatch):
    host.serve()
    client = host.client()
    mine, other = (
        Chain(Namespace(model_fingerprint="m", layout=SMALL, tenant_salt=t), 3) for t in ("mine", "other")
    )
    for chain in (mine, other):
        chain.save(client)
    run = functools.partial(workmem, "purge", tmp_path=host.folder)
    assert run("--tenant", "nobody", "--yes") == 0
    assert "nothing to purge" in capsys.readouterr().out
    assert run("--tenant", "mine") == 2
    assert "3 blocks of 1 namespace" in (said := capsys.readouterr().err)
    assert "--yes" in said
    assert run("--yes") == run("--root", "3fa9", "--yes") == 2
    monkeypatch.setattr("sys.stdin", Typed("n\n"))
    assert run("--tenant", "mine") == 2
    assert client.lookup(mine.root, mine.keys).blocks == 3
    monkeypatch.setattr("sys.stdin", Typed("y\n"))
    assert run("--tenant", "mine") == 0
    assert "purged 3 blocks of 1 namespace, 12.0 KiB" in capsys.readouterr().out.replace("\n", " ")
    assert client.lookup(mine.root, mine.keys).blocks == 0
    assert client.lookup(other.root, other.keys).blocks == 3


def test_purge_of_a_tenant_whose_blocks_were_all_evicted_takes_its_name_out(host, capsys):
    host.serve()
    mine = Chain(Namespace(model_fingerprint="m", layout=SMALL, tenant_salt="mine"), 3)
    mine.save(host.client())
    state, journal = host.store.pool.state, host.folder / "ssd" / "journal"
    with state.outbox:
        for row in list(host.store.pool.space(mine.root).rows.values()):
            state.withdraw(row, MissReason.EVICTED)
    assert host.store.flush(20)
    assert mine.root in journal.read_bytes()
    assert workmem("purge", "--tenant", "mine", "--yes", tmp_path=host.folder) == 0
    assert "nothing to purge" in capsys.readouterr().out
    assert mine.root not in journal.read_bytes()


def test_purge_takes_an_epoch_out_of_a_stopped_folder_and_waits_for_nobody_elses(tmp_path, capsys):
    folder = tmp_path / "ssd"
    settings = StoreConfig(dram=DramConfig(bytes="1MiB"), ssd=SsdConfig(path=str(folder), bytes="16MiB"))
    old, new = (Chain(Namespace(model_fingerprint="m", layout=SMALL, weights_epoch=n), 3) for n in (1, 2))
    with Store(settings) as store:
        for chain in (old, new):
            chain.save(store)
        assert workmem("purge", str(folder), "--epoch", "1", "--yes", tmp_path=tmp_path) == 2
        assert f"in use by process {os.getpid()}" in capsys.readouterr().err
    assert workmem("purge", str(folder), "--epoch", "1", "--yes", tmp_path=tmp_path) == 0
    assert "gone from the disk" in capsys.readouterr().out
    assert workmem("purge", str(tmp_path / "none"), "--epoch", "1", "--yes", tmp_path=tmp_path) == 2
    kept = b"".join(file.read_bytes() for file in (folder / "segments").iterdir())
    assert page_bytes(old.keys[1], SMALL)[:64] not in kept
    with Store(settings) as store:
        for chain, count in ((old, 0), (new, 3)):
            store.register(chain.space)
            assert store.lookup(chain.root, chain.keys).blocks == count


def test_scrub_reads_the_served_stores_disk(host, capsys):
    assert workmem("scrub", tmp_path=host.folder) == 2
    assert "workmem store verify" in capsys.readouterr().err
    host.serve()
    CHAIN.save(host.client())
    assert workmem("scrub", "--rate", "1GiB", tmp_path=host.folder) == 0
    assert "4 pages are what was written" in capsys.readouterr().out


class Typed(io.StringIO):
    """What somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


class Said:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, step: str) -> None:
        self.lines.append(step)

    end = note = begin


def config(folder: Path, attach: str) -> StoreConfig:
    return StoreConfig(
        dram=DramConfig(bytes="2MiB"),
        ssd=SsdConfig(path=str(folder / "ssd"), bytes="16MiB"),
        host=HostConfig(attach=attach, socket=str(folder / "store.sock")),
    )


def test_an_engine_attaches_by_itself_to_the_store_served_from_its_folder(host):
    assert HostConfig().attach == "auto"
    said = Said()
    with pytest.raises(ConfigError, match=r"store\.host\.attach.*workmem store serve"):
        _open_store(config(host.folder, "require"), host.folder, discard, said)
    said = Said()
    own = _open_store(config(host.folder, "auto"), host.folder, discard, said)
    assert isinstance(own, Store)
    own.close()
    # Nothing to hear about where nothing is served: that is how most start.
    assert not any("the host's store" in line for line in said.lines)
    host.serve()
    link = host.folder / "link"
    link.symlink_to(host.folder / "ssd")
    same = config(host.folder, "auto")
    for settings in (same, config(host.folder, "require"), through(same, link)):
        store = _open_store(settings, host.folder, discard, said)
        assert isinstance(store, HostStore)
        assert store.dram_capacity_bytes() > 0
        store.close()
    assert sum("attached to the host's store" in line for line in said.lines) == 3


def test_an_engine_with_a_folder_of_its_own_does_not_attach_unless_it_must(host):
    host.serve()
    said = Said()
    elsewhere = through(config(host.folder, "auto"), host.folder / "other")
    own = _open_store(elsewhere, host.folder, discard, said)
    assert isinstance(own, Store)
    own.close()
    assert any("another folder" in line for line in said.lines)
    in_memory = through(config(host.folder, "auto"), host.folder / "ssd", enabled=False)
    own = _open_store(in_memory, host.folder, discard, said)
    assert isinstance(own, Store)
    own.close()
    required = through(config(host.folder, "require"), host.folder / "other")
    attached = _open_store(required, host.folder, discard, said)
    assert isinstance(attached, HostStore)
    attached.close()
    with pytest.raises(ConfigError, match="in use by process"):
        _open_store(config(host.folder, "never"), host.folder, discard, said)


def through(settings: StoreConfig, folder: Path, **more) -> StoreConfig:
    return msgspec.structs.replace(
        settings, ssd=msgspec.structs.replace(settings.ssd, path=str(folder), **more)
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_engines_share_one_store_and_outlive_it(tmp_path):
    model = build_model(tmp_path / "model")
    attached = {"store.host.attach": "require", "store.host.socket": tmp_path / "store.sock"}
    prompt = " ".join(f"word{number}" for number in range(60))
    with store_served(tmp_path) as store:
        place = Place(model, tmp_path / "unused")
        with serving(place, more=attached) as one:
            cold = ask(one.url, prompt)
            assert "dram" not in sources(cold)
            with HostStore(tmp_path / "store.sock") as watcher:
                assert watcher.flush(30)
            with serving(place, more=attached) as two:
                shared = ask(two.url, prompt)
                assert sources(shared).get("dram", 0) > 0
                assert text(shared) == text(cold)
                os.kill(store.pid, signal.SIGKILL)
                store.wait(30)
                assert text(ask(two.url, prompt + " more")) == text(ask(one.url, prompt + " more"))
                with store_served(tmp_path), HostStore(tmp_path / "store.sock") as watcher:
                    wait_until(lambda: watcher.gauges()["store_host_connections"] >= 3)
                    other = ask(one.url, "other " + prompt)
                    assert watcher.flush(30)
                    assert text(ask(two.url, "other " + prompt)) == text(other)
    assert not (tmp_path / "unused").exists()
