"""A `mooncake_master` on this host: how it is told, started, waited for, ended."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from workmem.cluster.admin import Admin, AdminError
from workmem.cluster.config import ClusterConfig
from workmem.core.errors import ConfigError, TransferError

_POLL_S = 0.05
_END_S = 10.0
INSTALL = "Mooncake is not installed: pip install 'workmem[mooncake]'"


def mooncake_folder() -> Path | None:
    """Where Mooncake is installed, None where it is not. Loads nothing."""
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


def master_program() -> Path:
    """The master that came with Mooncake. Raises ConfigError where there is none."""
    folder = mooncake_folder()
    if folder is None:
        raise ConfigError(f"$.cluster.master: is empty, so that a master starts here, and {INSTALL}")
    program = folder / "mooncake_master"
    if not program.is_file():
        raise ConfigError(
            f"$.cluster.master: is empty, so that a master starts here, and {program} is not there; "
            "pip install --force-reinstall 'workmem[mooncake]'"
        )
    return program


def master_flags(config: ClusterConfig, *, port: int, admin_port: int) -> dict[str, str]:
    """What the master is told, by flag. Its own defaults listen everywhere and evict late."""
    flags = {
        "rpc_address": config.host,
        "rpc_port": str(port),
        "metrics_host": config.admin_host,
        "metrics_port": str(admin_port),
        "client_ttl": str(config.client_ttl_s),
        "default_kv_lease_ttl": f"{config.lease_s}s",
        "eviction_high_watermark_ratio": str(config.watermark),
        "eviction_ratio": str(config.evict_share),
        "enable_metric_reporting": "false",
        "logtostderr": "true",
        "minloglevel": "2",
    }
    if config.etcd:
        flags |= {
            "enable_ha": "true",
            "ha_backend_type": "etcd",
            "ha_backend_connstring": config.etcd,
            "enable_oplog": str(config.oplog).lower(),
        }
    return flags


class MasterProcess:
    """Started at once. Raises ConfigError where it cannot be, TransferError where it does not come up."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._program = master_program()
        self.port = config.port or _free_port("host", config.host)
        self.admin_port = config.admin_port or _free_port("admin_host", config.admin_host)
        self._refuse_taken("host", "port", config.host, self.port)
        self._refuse_taken("admin_host", "admin_port", config.admin_host, self.admin_port)
        self.admin = Admin(f"http://{_url_host(config.admin_host)}:{self.admin_port}")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """What clients are to be told."""
        return f"etcd://{self._config.etcd}" if self._config.etcd else f"{self._config.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process, 0 where there is none."""
        return self._process.pid if self._process else 0

    @property
    def is_running(self) -> bool:
        """It has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Begin; `wait` says when it is there."""
        flags = master_flags(self._config, port=self.port, admin_port=self.admin_port)
        self._process = subprocess.Popen(  # noqa: S603  the master of an installed package
            [str(self._program), *(f"--{name}={value}" for name, value in flags.items())],
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for us: pages are moved first, and it ends last.
            start_new_session=True,
        )

    def wait(self, timeout_s: float) -> None:
        """Until it answers, as leader or standing by. Raises TransferError."""
        until = time.monotonic() + timeout_s
        while True:
            with suppress(AdminError):
                health = self.admin.health()
                if health.service_ready or self._config.etcd:
                    return
            if not self.is_running:
                code = self._process.returncode if self._process else None
                raise TransferError(
                    f"the master ended as it started (exit code {code}); its last lines say why"
                )
            if time.monotonic() >= until:
                raise TransferError(f"the master does not answer at {self.admin.url} within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End it, and wait until it has."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _refuse_taken(self, host_key: str, port_key: str, host: str, port: int) -> None:
        try:
            with socket.create_server((host, port), family=_family(host)):
                pass
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise _not_own(host_key, host) from error
            raise ConfigError(
                f"$.cluster.{port_key}: {host}:{port} cannot be listened on ({os.strerror(error.errno or 0)}); where a master runs there already, "
                f"join it with cluster.master={self._config.host}:{self._config.port}, else take another port, or 0 for a free one"
            ) from error


def _free_port(key: str, host: str) -> int:
    try:
        with socket.create_server((host, 0), family=_family(host)) as found:
            return int(found.getsockname()[1])
    except OSError as error:
        raise _not_own(key, host) from error


def _not_own(key: str, host: str) -> ConfigError:
    other = ", or the master's in cluster.master" if key == "host" else ""
    return ConfigError(
        f"$.cluster.{key}: {host!r} is no address of this host; write one that `ip address` lists{other}"
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _url_host(host: str) -> str:
    if host in {"", "0.0.0.0", "::"}:  # noqa: S104  where to ask, not where to listen
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
