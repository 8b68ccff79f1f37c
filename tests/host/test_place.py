"""Where a host's store listens, and who may come."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from workmem.config import host_socket
from workmem.core.errors import ConfigError, TransferError
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.host import peer
from workmem.store.host.client import HostStore
from workmem.store.host.place import SocketPlace
from workmem.store.store import Store
from workmem.testing.pages import Chain, namespace

CHAIN = Chain(namespace("small"), 2)


def test_only_the_user_reaches_the_socket(host):
    host.socket = host.folder / "made" / "store.sock"
    host.serve(ssd=0)
    assert stat.S_IMODE(host.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(host.socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(f"{host.socket}.lock").stat().st_mode) == 0o600


def test_a_folder_open_to_others_is_refused_with_what_to_do(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"store\.host\.socket.*mode 755.*chmod 700"):
        SocketPlace(folder / "store.sock").listen()


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(ConfigError, match="another user"):
        SocketPlace(tmp_path / "store.sock").listen()


def test_a_link_in_place_of_the_folder_is_refused(tmp_path):
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(ConfigError, match="is a link"):
        SocketPlace(tmp_path / "link" / "store.sock").listen()
    assert list(real.iterdir()) == []


def test_the_arena_is_the_users_own(host, tmp_path):
    # A file that backs it can be opened by name; memory without one by those who get its descriptor.
    with Store(
        StoreConfig(dram=DramConfig(bytes="1MiB", path=str(tmp_path / "arena")), ssd=SsdConfig(enabled=False))
    ):
        made = (tmp_path / "arena").stat()
        assert (stat.S_IMODE(made.st_mode), made.st_uid) == (0o600, os.getuid())
    host.serve(ssd=0)
    assert os.fstat(host.store.arena.fd).st_uid == os.getuid()
    assert str(Path(f"/proc/self/fd/{host.store.arena.fd}").readlink()).startswith("/memfd:")


def test_processes_of_another_user_are_refused(host, monkeypatch):
    host.serve(ssd=0)
    monkeypatch.setattr(peer.os, "getuid", lambda: 4242)
    with pytest.raises(TransferError, match="user"):
        HostStore(host.socket)
    monkeypatch.undo()
    CHAIN.save(host.client())


def test_a_live_server_is_not_replaced_and_a_dead_ones_socket_is(tmp_path):
    path = tmp_path / "store.sock"
    first = SocketPlace(path)
    first.listen()
    with pytest.raises(ConfigError, match=r"listening at .* already"):
        SocketPlace(path).listen()
    assert path.is_socket()
    first.close()
    assert not path.exists()
    # What a killed server leaves: a socket nobody listens on, and a lock's file nobody holds.
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    successor = SocketPlace(path)
    successor.listen()
    successor.close()


def test_what_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "store.sock"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no socket"):
        SocketPlace(path).listen()
    assert path.read_text(encoding="utf-8") == "mine"
    path.unlink()
    place = SocketPlace(path)
    place.listen()
    place.close()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    long = tmp_path / ("x" * 120)
    with pytest.raises(ConfigError, match="longer than"):
        SocketPlace(long).listen()
    with pytest.raises(ConfigError, match="longer than"):
        HostStore(long)


def test_the_default_place_is_the_users_runtime_folder_else_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert host_socket("") == tmp_path / "run" / "workmem" / "store.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert host_socket("") == tmp_path / "cache" / "workmem" / "run" / "store.sock"
    assert host_socket("/x/y.sock") == Path("/x/y.sock")
