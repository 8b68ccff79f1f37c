"""What a doctor sees of this host: programs of Mooncake that run, libraries, devices, ports that are open."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import msgspec

from workmem.cluster.addresses import OwnAddress, own_addresses

LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""By name: the package of Debian and Ubuntu."""
_PROC = Path("/proc")
_ASK_S = 20.0
_LISTEN = "0A"
_KEY_OF_ONE_BLOCK = "from workmem.core.keys import block_key; print(block_key(b'doctor', range(16)).hex())"


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program of Mooncake that runs here."""

    pid: int
    name: str
    flags: dict[str, str]
    variables: dict[str, str]
    """Those of its environment that Mooncake reads; empty where we may not look."""

    def on(self, flag: str) -> bool:
        """Whether it was told so."""
        return self.flags.get(flag, "false").lower() in {"", "1", "t", "true", "y", "yes"}


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """One host, at one moment."""

    builds: dict[str, str]
    """Installed builds of Mooncake, with versions."""
    import_problem: str
    """Why it does not load; empty where it does."""
    missing_libraries: tuple[str, ...]
    """Packages of the system that are not there."""
    has_gpu: bool
    rdma_devices: tuple[str, ...]
    memlock_bytes: int
    """Memory that may be locked; -1 is all."""
    addresses: tuple[OwnAddress, ...]
    open_ports: tuple[int, ...]
    """TCP ports on which somebody listens on every address."""
    programs: tuple[Program, ...]
    names_agree: bool
    """A block's name is the same whatever seed Python hashes with."""


def look_here() -> Here:
    """Look. Takes a second or two: some things are tried in processes of their own."""
    return Here(
        builds=_builds(),
        import_problem=_import_problem(),
        missing_libraries=_missing_libraries(),
        has_gpu=Path("/dev/nvidiactl").exists(),
        rdma_devices=tuple(sorted(found.name for found in Path("/sys/class/infiniband").glob("*"))),
        memlock_bytes=_memlock_bytes(),
        addresses=tuple(own_addresses()),
        open_ports=_open_ports(),
        programs=_programs(_PROC),
        names_agree=_names_agree(),
    )


def _builds() -> dict[str, str]:
    return {
        found.name: found.version
        for found in distributions()
        if (found.name or "").lower().replace("_", "-").startswith("mooncake-transfer-engine")
    }


def _import_problem() -> str:
    done = _python("import mooncake.store")
    return (
        "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    )


def _python(code: str, seed: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own: a library that does not load may end it."""
    command = [sys.executable, "-c", code]
    if seed is not None:
        command = ["env", f"PYTHONHASHSEED={seed}", *command]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ASK_S)  # noqa: S603
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end within {_ASK_S:g} s")


def _missing_libraries() -> tuple[str, ...]:
    missing: list[str] = []
    for name, package in LIBRARIES.items():
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(package)
    return tuple(missing)


def _memlock_bytes() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _names_agree() -> bool:
    said = {_python(_KEY_OF_ONE_BLOCK, seed).stdout for seed in ("0", "1")}
    return len(said) == 1 and said != {""}


def _open_ports() -> tuple[int, ...]:
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue  # No IPv6 here.
        for line in lines:
            address, port = line.split()[1].split(":")
            if line.split()[3] == _LISTEN and not int(address, 16):
                ports.add(int(port, 16))
    return tuple(sorted(ports))


def _programs(proc: Path) -> tuple[Program, ...]:
    found: list[Program] = []
    for folder in sorted(proc.glob("[0-9]*")):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # It ended meanwhile.
        name = next(
            (
                Path(word).name
                for word in words[:2]
                if Path(word).name in {"mooncake_master", "mooncake_client"}
            ),
            "",
        )
        if name:
            found.append(
                Program(
                    pid=int(folder.name),
                    name=name,
                    flags=flags_of(words),
                    variables=_variables(folder / "environ"),
                )
            )
    return tuple(found)


def flags_of(words: list[str]) -> dict[str, str]:
    """Flags as gflags reads them: `--name=value`, `--name value`, `--name`, `--noname`."""
    flags: dict[str, str] = {}
    for place, word in enumerate(words):
        if not (match := re.fullmatch(r"--?([\w-]+)(=.*)?", word)):
            continue
        name = match[1].replace("-", "_")
        after = words[place + 1] if place + 1 < len(words) else ""
        if match[2]:
            flags[name] = match[2][1:]
        elif name.startswith("noenable_"):
            flags[name[2:]] = "false"
        else:
            flags[name] = "" if name.startswith("enable_") or after.startswith("-") else after
    return flags


def _variables(file: Path) -> dict[str, str]:
    try:
        lines = os.fsdecode(file.read_bytes()).split("\0")
    except OSError:
        return {}  # Another user's.
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, _, value in pairs if name.startswith(("MOONCAKE_", "MC_"))}
