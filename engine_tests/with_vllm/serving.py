"""vLLM's own server in processes of its own, over a store of the test's: asked as clients ask it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

START_S = 420.0
"""On a busy machine: a server is three processes that each import vLLM."""
ANSWER_S = 120.0


class Answer(NamedTuple):
    """To one request. `tokens`: generated; `sources`: prompt tokens by where they came from."""

    status: int
    tokens: list[int]
    sources: dict[str, int]
    said: dict[str, Any]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


class Server:
    """Made at once, answers from `wait` on. All its processes are one group, whose end is the test's to choose."""

    def __init__(self, command: list[str], folder: Path, name: str, **env: str) -> None:
        """`command`: behind Python, and without a port."""
        self.port = free_port()
        self.log = folder / f"{name}.log"
        self._made: set[str] = set()
        set_here = {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            # What the tests share with it lies beside them.
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            **env,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **set_here},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < until, self.tail()
            with contextlib.suppress(OSError):
                if self.get("/health")[0] == 200:
                    return
            time.sleep(0.2)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def members(self) -> list[int]:
        """Its processes that live."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getpgid(int(entry.name)) == self.process.pid:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(entry.name)] if state != "Z" else []
        return found

    def kill(self) -> None:
        """All of it at once, as when its container is."""
        shared = _shared_of(self.members())
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        _until_gone(self.members)
        # What nobody has mapped any more: its tracker of such files was killed with it.
        for name in shared - _shared_of(
            [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        ):
            Path(name).unlink(missing_ok=True)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        if self.members():
            self.kill()

    # -- as a client

    def get(self, path: str) -> tuple[int, str]:
        return self._ask("GET", path, None)

    def post(self, path: str, body: object = None) -> tuple[int, str]:
        return self._ask("POST", path, body)

    def complete(
        self,
        ids: list[int],
        *,
        model: str,
        n: int = 8,
        salt: str = "",
        streams: bool = False,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> Answer:
        """Greedy. What came with a stream is put together; its `sources` are not told then."""
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": n,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": streams,
            **({"cache_salt": salt} if salt else {}),
            **more,
        }
        status, text = self._ask("POST", "/v1/completions", body, headers)
        if status != 200:
            return Answer(status, [], {}, json.loads(text))
        if streams:
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            assert lines.pop() == "[DONE]", text[-300:]
            parts = [json.loads(line) for line in lines]
            assert not any("error" in part for part in parts), text[-300:]
            tokens = [token for part in parts for token in part["choices"][0].get("token_ids") or ()]
            return Answer(status, tokens, {}, {})
        said = json.loads(text)
        ours = (said.get("kv_transfer_params") or {}).get("workmem") or {}
        return Answer(status, said["choices"][0]["token_ids"], ours.get("tokens", {}), said)

    def reset(self, *, external: bool = False) -> bool:
        status, text = self.post(f"/reset_prefix_cache?reset_external={str(external).lower()}")
        assert status == 200, text
        return json.loads(text)["success"]

    def metric(self, name: str) -> float:
        """Sum over its labels."""
        _, text = self.get("/metrics")
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        assert lines, f"no {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _ask(
        self, method: str, path: str, body: object, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            said = None if body is None else json.dumps(body)
            connection.request(method, path, said, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


def by_hand(
    model: Path, host_socket: Path, *words: str, settings: dict[str, str], **transfer: str
) -> list[str]:
    """VLLM's own command, with a configuration as somebody writes it who has not read of `recompute`."""
    config = {
        "kv_connector": "WorkmemConnector",
        "kv_connector_module_path": "workmem.plugins.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "store.host.socket": str(host_socket),
            "vllm.start_store": "false",
            **settings,
        },
        **transfer,
    }
    return [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--kv-transfer-config",
        json.dumps(config),
        "--prefix-caching-hash-algo",
        "sha256_cbor",
        *words,
    ]


def by_command(model: Path, host_socket: Path, *words: str, settings: dict[str, str]) -> list[str]:
    """Ours."""
    said = {"store.host.socket": str(host_socket), "vllm.start_store": "false", **settings}
    sets = [word for path, value in said.items() for word in ("--set", f"{path}={value}")]
    return ["-m", "workmem", "vllm", "serve", str(model), *sets, *words]


def _shared_of(processes: list[int]) -> set[str]:
    """Files of shared memory that they have mapped."""
    found: set[str] = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.split(maxsplit=5)[-1]
                if name.startswith("/dev/shm/") and not name.endswith(" (deleted)"):
                    found.add(name)
    return found


def _until_gone(members: Any) -> None:
    until = time.monotonic() + 30
    while members():
        assert time.monotonic() < until, "killed processes do not end"
        time.sleep(0.05)
