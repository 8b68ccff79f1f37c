"""Mooncake as an installed library: how it is loaded, what it reads as it starts, and how its log is kept still.

Its store and its engine are one library in a process: who loads it first sets how long both wait.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from pathlib import Path
from types import ModuleType

from workmem.core.errors import ConfigError

log = logging.getLogger(__name__)

TIMEOUT_S = 3.0
"""Longest that it waits for a peer that took the connection and says nothing."""
LATE_S = 0.8 * TIMEOUT_S
"""A call that failed after so long has waited for such a peer. Its return codes do not say."""
_ENVIRONMENT = {
    b"MC_TCP_STATUS_TIMEOUT_SEC": b"%d" % TIMEOUT_S,
    b"MC_TCP_PROGRESS_TIMEOUT_SEC": b"%d" % TIMEOUT_S,
    b"MC_HANDSHAKE_CONNECT_TIMEOUT": b"%d" % TIMEOUT_S,
    b"MC_RPC_TIMEOUT_MS": b"%d" % (1000 * TIMEOUT_S),
    b"MC_RPC_CONNECT_TIMEOUT_MS": b"1000",
    b"MC_LOG_LEVEL": b"ERROR",
}
"""Whoever set them knows better."""
_SILENT = 4
"""Above the highest level of its log: what fails is an answer here, and told by us."""


def load_mooncake(module: str, needed_by: str) -> ModuleType:
    """One of its modules. Raises ConfigError, saying what to install, where it is not there or does not load."""
    setenv = ctypes.CDLL(None).setenv
    for name, value in _ENVIRONMENT.items():
        setenv(name, value, 0)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{needed_by} needs Mooncake, which is not installed: pip install 'workmem[mooncake]'"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"{needed_by} needs Mooncake, which is installed and does not load ({error}). It needs libraries of the "
            "system; on Debian and Ubuntu: apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"
        ) from error


def hush(module: ModuleType) -> None:
    """Its log goes to stderr whatever it is told, a line for every page that is not there."""
    for library in Path(str(module.__file__)).parent.parent.glob("mooncake_transfer_engine*.libs/libglog*"):
        try:
            ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "_ZN3fLI17FLAGS_minloglevelE").value = _SILENT
        except (OSError, ValueError) as error:
            log.debug("Mooncake's log cannot be turned down: %s", error)
