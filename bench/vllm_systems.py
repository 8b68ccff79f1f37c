"""Ways to run vLLM with its contexts kept somewhere: how each is configured, and which servers it needs beside it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from systems import System

SOURCE = Path(__file__).parents[1] / "src"
SHARED_MEMORY = Path("/dev/shm")
ALONE, OURS = "vLLM", "workmem"
NATIVE, LMCACHE, MOONCAKE = "vLLM tiered offload", "LMCache", "Mooncake"
GIB = 1 << 30
DRAM_GIB = 1
"""Of each system's memory tier."""
SSD = "16GiB"
CHUNK_TOKENS = 256
"""LMCache's own default; every prompt here ends a few tokens behind a whole number of them."""


class Place(NamedTuple):
    """Where a system keeps its things during a run."""

    folder: Path
    """What is on disk: stays over restarts."""
    sockets: Path
    """A folder of its own: a socket's address is short."""
    tag: str
    """In the name of whatever it leaves in shared memory."""


class Kind(NamedTuple):
    """One way: its tiers, and how it is started, anew each time (ports are those free then)."""

    name: str
    tiers: tuple[str, ...]
    start: Callable[[dict[str, Any], Place], dict[str, Any]]
    """From the options all have in common to those of this one."""
    python: Path
    is_paused: bool = True
    """False where the parts lose each other when none of them runs for a while."""
    why_absent: str = ""


BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def fastest_dtype(cpu_flags: Iterable[str]) -> str:
    """Of vLLM on this CPU: without arithmetic for bf16, float32 prefills five times as fast (`bench/engine.py`)."""
    return "bfloat16" if BF16_FLAGS & set(cpu_flags) else "float32"


def add_pythons(parser: argparse.ArgumentParser) -> None:
    """The options that say where vLLM and its peers live."""
    parser.add_argument(
        "--vllm-python", type=Path, required=True, help="Python of an environment with vLLM for CPU"
    )
    parser.add_argument("--lmcache-python", type=Path, help="Python of an environment with LMCache")
    parser.add_argument("--mooncake-python", type=Path, help="Python of an environment with Mooncake")


def add_dtype(parser: argparse.ArgumentParser, cpu_flags: Iterable[str]) -> None:
    """The option that says in what all of them compute."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=fastest_dtype(cpu_flags),
        help="of every vLLM; default: what this CPU computes fastest, so that no baseline is slowed",
    )


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def alone(shared: dict[str, Any], _: Place) -> dict[str, Any]:
    """VLLM as it is: its own prefix cache."""
    return shared


def dram_gib(shared: dict[str, Any]) -> int:
    """Of each system's memory tier, where a benchmark needs another one."""
    return shared.get("dram_gib", DRAM_GIB)


def ours(shared: dict[str, Any], place: Place, dram: str = "") -> dict[str, Any]:
    """As `workmem vllm serve` adds to vLLM, over a store that ends with it."""
    path = place.sockets / "s.sock"
    store = {
        "store.host.socket": str(path),
        "store.dram.bytes": dram or f"{dram_gib(shared)}GiB",
        "store.ssd.path": str(place.folder / "ssd"),
        "store.ssd.bytes": SSD,
    }
    command = [sys.executable, "-m", "workmem", "store", "serve"]
    for name, value in store.items():
        command += ["--set", f"{name}={value}"]
    source = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return shared | {
        "servers": [{"command": command, "socket": str(path), "environment": {"PYTHONPATH": source}}],
        "llm": {"prefix_caching_hash_algo": "sha256_cbor"},
        "kv_transfer_config": {
            "kv_connector": "WorkmemConnector",
            "kv_connector_module_path": "workmem.plugins.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store.host.socket": str(path), "vllm.start_store": "false"},
        },
    }


def native(shared: dict[str, Any], place: Place) -> dict[str, Any]:
    """VLLM's own tiers: host memory, and files below it. Its copies are ours: it has none for a CPU."""
    return shared | {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": place.tag,
            "kv_connector_extra_config": {
                "spec_name": "WorkmemCpuSpec",
                "spec_module_path": "workmem.plugins.vllm_cpu",
                "cpu_bytes_to_use": dram_gib(shared) * GIB,
                "secondary_tiers": [
                    {
                        "type": "fs",
                        "root_dir": str(place.folder / "files"),
                        "n_read_threads": 2,
                        "n_write_threads": 2,
                    }
                ],
            },
        }
    }


def lmcache(python: Path) -> Callable[[dict[str, Any], Place], dict[str, Any]]:
    """LMCache's server of its own, over shared memory, files below."""

    def start(shared: dict[str, Any], place: Place) -> dict[str, Any]:
        port, files = free_port(), place.folder / "files"
        files.mkdir(parents=True, exist_ok=True)
        command = [str(python), str(python.parent / "lmcache"), "server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(free_port())]
        command += ["--l1-size-gb", str(dram_gib(shared)), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        command += ["--chunk-size", str(shared.get("chunk_tokens", CHUNK_TOKENS)), "--disable-observability"]
        command += ["--supported-transfer-mode", "auto", "--shm-name", place.tag]
        command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(files)})]
        quiet = {
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_LOG_LEVEL": "WARNING",
        }
        return shared | {
            "environment": quiet,
            "packages": packages_of(python),
            "versions": ["lmcache"],
            "servers": [{"command": command, "port": port}],
            "llm": {"disable_hybrid_kv_cache_manager": True},
            "kv_transfer_config": {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": port,
                },
            },
        }

    return start


def mooncake(python: Path) -> Callable[[dict[str, Any], Place], dict[str, Any]]:
    """VLLM's MooncakeStoreConnector, the segment in the engine's process: a restart loses it."""

    def start(shared: dict[str, Any], place: Place) -> dict[str, Any]:
        port, settings = free_port(), place.folder / "mooncake.json"
        place.folder.mkdir(parents=True, exist_ok=True)
        config = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{port}",
            "global_segment_size": f"{dram_gib(shared)}GB",
            "local_buffer_size": "256MB",
            "protocol": "tcp",
            "device_name": "",
        }
        settings.write_text(json.dumps(config))
        # Whoever is busy with a long prompt is not dead.
        flags = {"port": port, "rpc_address": "127.0.0.1", "metrics_port": free_port(), "client_ttl": 120}
        command = [str(python.parent / "mooncake_master"), *(f"--{k}={v}" for k, v in flags.items())]
        return shared | {
            "environment": {
                "MOONCAKE_CONFIG_PATH": str(settings),
                "VLLM_HOST_IP": "127.0.0.1",
                "MC_TCP_BIND_ADDRESS": "127.0.0.1",
                "PYTHONHASHSEED": "0",
            },
            "packages": packages_of(python),
            "versions": ["mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"],
            "servers": [{"command": command, "port": port}],
            "kv_transfer_config": {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
        }

    return start


def packages_of(python: Path) -> list[str]:
    """Folder of that environment's packages: vLLM's own Python has them behind its own, so vLLM is one and the same."""
    said = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", said], capture_output=True, text=True, check=True)
    return [done.stdout.strip()]


def kinds(
    vllm_python: Path, lmcache_python: Path | None, mooncake_python: Path | None, only: Sequence[str] = ()
) -> list[Kind]:
    """All of them, in the order in which they are measured; vLLM alone and ours are neighbours."""
    found = [
        Kind(ALONE, (), alone, vllm_python),
        Kind(OURS, ("dram", "ssd"), ours, vllm_python),
        Kind(NATIVE, ("dram", "ssd"), native, vllm_python),
    ]
    peers = (
        (LMCACHE, ("dram", "ssd"), lmcache, lmcache_python, "--lmcache-python"),
        (MOONCAKE, ("dram",), mooncake, mooncake_python, "--mooncake-python"),
    )
    for name, tiers, make, python, option in peers:
        absent = "" if python else f"{option} was not given"
        found.append(Kind(name, tiers, make(python or Path()), vllm_python, False, absent))
    return [kind for kind in found if not only or kind.name in only]


def system_of(kind: Kind, shared: dict[str, Any], place: Place) -> System:
    """To be started now."""
    return System(kind.name, kind.python, "vllm_cached.py", kind.start(shared, place))


def new_tag() -> str:
    """Of one start."""
    return f"wm-bench-{uuid.uuid4().hex[:12]}"


def sweep(tag: str) -> None:
    """What a process that was killed left in shared memory."""
    for path in SHARED_MEMORY.glob(f"*{tag}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def drop_page_cache(folder: Path) -> None:
    """Files below `folder` are read from the disk next time."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
