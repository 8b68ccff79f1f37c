"""What every benchmark here shares: the machine it ran on, statistics, and a run that can be resumed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("workmem", "torch", "transformers", "numpy", "xxhash", "starlette", "uvicorn", "aiohttp")
_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_tile",
    "asimd",
    "bf16",
    "sve",
)


def environment() -> dict[str, Any]:
    """Machine, versions and commit: what a reader needs to believe or repeat a number."""
    cpu = _cpu_info()
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu.get("model name", platform.processor()),
        "cpu_flags": [flag for flag in _FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1m": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "commit": _git("rev-parse", "--short", "HEAD"),
        "tree_is_clean": _git("status", "--porcelain", "--untracked-files=no") == "",
    }


def _cpu_info() -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Median and spread of repeated measurements."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "n": len(ordered),
    }


def in_turns(names: Sequence[str], round_number: int) -> list[str]:
    """Order of the systems in a round: reversed in every second one, so that no side always goes first."""
    return list(names) if round_number % 2 == 0 else list(reversed(names))


def parser_of(about: str, bench: str, *, quick: Any, full: Any, smoke: Any) -> argparse.ArgumentParser:
    """The options that every benchmark takes; `quick`, `full` and `smoke` are what `mode` becomes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_modes(parser, quick=quick, full=full, smoke=smoke)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of safetensors, with tokenizer.json"
    )
    parser.add_argument("--workloads", type=Path, help="folder of more natural text")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--out", type=Path, help=f"result file; default bench/results/{bench}-MODE.json")
    parser.add_argument("--minutes", type=float, help="less time than the mode has; what is left out is said")
    return parser


def add_modes(parser: argparse.ArgumentParser, *, quick: Any, full: Any, smoke: Any) -> None:
    """The options that say how much is measured."""
    which = parser.add_mutually_exclusive_group()
    for mode, text in (
        (quick, "at most 10 minutes"),
        (full, "at most 60 minutes (default)"),
        (smoke, "tiny sizes: does it run?"),
    ):
        which.add_argument(f"--{mode.name}", dest="mode", action="store_const", const=mode, help=text)
    parser.set_defaults(mode=full)


def mode_of(arguments: argparse.Namespace) -> Any:
    """The mode that was asked for, with the time that was asked for."""
    if arguments.minutes is None:
        return arguments.mode
    return arguments.mode._replace(budget_s=min(arguments.mode.budget_s, 60 * arguments.minutes))


def end_on_sigterm() -> None:
    """End as Ctrl-C ends a run: systems are ended, and what they left in shared memory goes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Journal:
    """Measurements on disk as they are made. A run with the same configuration picks up where it stopped."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._path = path
        self._config = json.loads(json.dumps(config))
        self.done: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        """By system, those of earlier runs too: a run that goes on does not start what is measured already."""
        if path.exists():
            head, *lines = path.read_text().splitlines() or ["{}"]
            if json.loads(head).get("config") == self._config:
                for entry in filter(None, map(_parsed, lines)):
                    self._read(entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        known = [{"versions_of": name, "versions": found} for name, found in self.versions.items()]
        body = [{"config": self._config}, *known, *self.done.values()]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in body))

    def record(self, unit: str, **fields: Any) -> dict[str, Any]:
        """Keep one measurement (or the reason why there is none)."""
        entry = {"unit": unit, "load_1m": os.getloadavg()[0], **fields}
        self.done[unit] = entry
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return entry

    def keep_versions(self, system: str, versions: dict[str, Any]) -> None:
        """What a system that started says it is made of."""
        if self.versions.get(system) == versions:
            return
        self.versions[system] = versions
        with self._path.open("a") as file:
            file.write(json.dumps({"versions_of": system, "versions": versions}) + "\n")

    def _read(self, entry: dict[str, Any]) -> None:
        if "versions_of" in entry:
            self.versions[entry["versions_of"]] = entry["versions"]
        else:
            self.done[entry["unit"]] = entry

    def close(self) -> None:
        """Forget the journal: the result file has everything."""
        self._path.unlink(missing_ok=True)


def _parsed(line: str) -> dict[str, Any] | None:
    """One entry; None for a line that a killed run left half written."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


class Budget:
    """Wall time left: what bounds a run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.seconds - (time.monotonic() - self._start))


def without_folders(value: Any) -> Any:
    """Texts, also those within lists and objects, as a result may hold them: without the folders of the machine."""
    if isinstance(value, str):
        return re.sub(r"(?:/[\w.+-]+)+/", "", value)
    if isinstance(value, dict):
        return {name: without_folders(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(each) for each in value]
    return value


def write_result(path: Path, body: dict[str, Any]) -> None:
    """Write a result file, whole or not at all. What is `absent` is told without the folders of the machine."""
    if "absent" in body:
        body = body | {"absent": without_folders(body["absent"])}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(body, indent=1, sort_keys=False) + "\n")
    partial.replace(path)


def folder_of_run(out: Path, base: Path | None = None, *, is_new: bool) -> Path:
    """Where a run keeps what it needs on disk; of a new one, without what another left: that would make its first samples warm."""
    folder = (base or Path(tempfile.gettempdir())) / f"workmem-bench-{out.stem}"
    if is_new:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def end_run(journal: Journal, out: Path, folder: Path, skipped: Any) -> str:
    """Forget what a run was to go on from, unless it left something out. What to say of it."""
    if skipped:
        return f"written to {out}; run the same command again to fill what time left out"
    journal.close()
    shutil.rmtree(folder, ignore_errors=True)
    return f"written to {out}"


class Texts:
    """Natural text as token ids: the demo's conversations, and any folder of texts beside them."""

    def __init__(self, model: Path, folder: Path | None, seed: int) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only the controller has it

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        pieces = [*_demo_texts(), *(_folder_texts(folder) if folder else ())]
        self._random = random.Random(seed)
        self._random.shuffle(pieces)
        self._ids = [
            token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids
        ]

    def prompt(self, tokens: int) -> list[int]:
        """`tokens` ids cut out at a random place; no two share a prefix."""
        start = self._random.randrange(len(self._ids))
        ids = self._ids[start : start + tokens]
        while len(ids) < tokens:
            ids += self._ids[: tokens - len(ids)]
        # A random first token forks the prefix even where two cuts coincide.
        return [self._random.choice(self._ids), *ids[1:]]


def _demo_texts() -> list[str]:
    from workmem.demo.runs import airline_runs  # noqa: PLC0415 - only the controller has it

    runs = airline_runs()
    policy = [str(runs[0].messages[0]["content"])]
    return policy + ["\n".join(str(message["content"]) for message in run.messages[1:]) for run in runs]


def _folder_texts(folder: Path, bytes_max: int = 4_000_000) -> Iterable[str]:
    import gzip  # noqa: PLC0415

    left = bytes_max
    for path in sorted(folder.rglob("*")):
        if left <= 0 or not path.is_file() or path.suffix not in {".gz", ".jsonl", ".json", ".txt", ".md"}:
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        yield data[: min(left, 400_000)].decode(errors="ignore")
        left -= min(len(data), 400_000)
