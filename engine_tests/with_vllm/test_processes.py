"""Several engines over one store that nobody started by hand: what one computes, another one has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WAIT_S = 240.0


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory(prefix="wm-") as name:
        yield Path(name)
        stop_store(Path(name))


def engine(
    folder: Path, model: Path, *lines: str, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """A process with an `LLM` that runs lines of Python; see child.py."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "child.py"), str(folder), str(model), "\n".join(lines)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **(env or {})},
    )


def answers(process: subprocess.Popen[str]) -> list[dict]:
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    return [json.loads(line[7:]) for line in out.splitlines() if line.startswith("answer ")]


def stop_store(folder: Path) -> None:
    listing = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout
    (pid,) = (
        int(line.split()[0]) for line in listing.splitlines() if "store serve" in line and str(folder) in line
    )
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until, "the store does not stop"
        time.sleep(0.1)


def test_a_fresh_process_has_what_another_computed(folder: Path, smollm2: Path):
    (first, hit) = answers(engine(folder, smollm2, "ask(257, 1)", "ask(257, 1)", "saved()"))
    assert first["tokens"] == {"computed": 257}
    (again,) = answers(engine(folder, smollm2, "ask(257, 1)"))
    assert again["tokens"] == {"dram": 256, "computed": 1}
    assert again["ids"] == hit["ids"]
    stop_store(folder)
    (later,) = answers(engine(folder, smollm2, "ask(257, 1)"))
    assert later["tokens"]["computed"] <= 1, "the ssd has it after the store was stopped"
    assert later["ids"] == hit["ids"]


def test_one_that_is_killed_while_it_saves_harms_nobody(folder: Path, smollm2: Path):
    dying = engine(
        folder, smollm2, "slow_saves()", "ask(385, 2)", "print('answer {}', flush=True)", "time.sleep(60)"
    )
    assert dying.stdout is not None
    while (line := dying.stdout.readline()) and not line.startswith("answer {}"):
        pass
    time.sleep(0.2)
    dying.kill()
    dying.wait()
    (found, hit, other) = answers(
        engine(folder, smollm2, "ask(385, 2)", "ask(385, 2)", "ask(257, 1)", "audit()")
    )
    assert found["tokens"]["computed"] >= 1
    assert found["ids"] == hit["ids"]
    assert other["tokens"]["computed"] <= 1


def test_other_weights_never_hit(folder: Path, smollm2: Path, tmp_path: Path):
    """The same name, another fingerprint."""
    other = tmp_path / smollm2.name
    other.mkdir()
    for file in smollm2.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = next(other.glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1000] ^= 1
    weights.write_bytes(raw)
    (answer,) = answers(engine(folder, other, "ask(257, 1)"))
    assert answer["tokens"] == {"computed": 257}
