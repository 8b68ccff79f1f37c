"""vLLM on a CPU, in process, with a connector or none, and the servers that the connector needs beside it.

Runs under vLLM's own Python. Requests (`do`):
    ask     one prompt, greedy: when its tokens came, which, how many of the prompt were cached, and from where
    fleet   many prompts, some in flight at a time, as `ask` each
    play    sessions, each of which asks again a while after its last answer, as `ask` each
    settle  wait until what was computed has left the engine; seconds that took
    reset   empty vLLM's own prefix cache
    close   end the engine, then its servers, so that what they hold reaches their disks
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

from open_loop import play
from protocol import Handle, end_with_controller, serve_requests

SERVER_S = 60.0
SETTLE_S = 20.0
QUIET_S = 0.15
NUDGES = 3
"""Some connectors hear of finished transfers only as the engine computes."""


class Servers:
    """Processes that a connector needs. They stay in this one's process group, to be stopped and ended with it."""

    def __init__(self, wanted: list[dict[str, Any]]) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        for server in wanted:
            environment = os.environ | server.get("environment", {})
            # Standard output is the controller's channel.
            process = subprocess.Popen(
                server["command"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=2,
                preexec_fn=end_with_controller,  # noqa: PLW1509 - no other thread runs yet
            )
            self._running.append(process)
            self._wait(process, server)

    def close(self) -> None:
        """The last one first; each gets the time to save."""
        for process in reversed(self._running):
            process.send_signal(signal.SIGINT)
            try:
                process.wait(SERVER_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._running = []

    def _wait(self, process: subprocess.Popen[bytes], server: dict[str, Any]) -> None:
        """Until it listens. Raises RuntimeError."""
        until = time.monotonic() + SERVER_S
        while time.monotonic() < until:
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(server['command'])} ended with {process.returncode}")
            family = socket.AF_UNIX if "socket" in server else socket.AF_INET
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.settimeout(1.0)
                probe.connect(server.get("socket") or ("127.0.0.1", server["port"]))
                return
            time.sleep(0.1)
        raise RuntimeError(f"{' '.join(server['command'])} did not listen within {SERVER_S:.0f} s")


class Engine:
    """An `LLM`, stepped by hand so that each token is seen when it comes."""

    def __init__(self, options: dict[str, Any], servers: Servers) -> None:
        import vllm  # noqa: PLC0415 - after the environment is set

        self._servers = servers
        self._sampling = vllm.SamplingParams
        self._nudge = options["nudge"]
        more = options.get("engine", {}) | options.get("llm", {})
        if transfer := options.get("kv_transfer_config"):
            more["kv_transfer_config"] = transfer
        if options.get("blocks"):
            more["num_gpu_blocks_override"] = options["blocks"]
        self._llm = vllm.LLM(
            model=options["model"],
            dtype=options["dtype"],
            max_model_len=options["max_context"],
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
            **more,
        )
        self._engine = self._llm.llm_engine
        self._serial = 0

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of vLLM's."""
        return self._engine.vllm_config.cache_config.block_size

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """See the module."""
        match request["do"]:
            case "ask":
                (answer,) = self._answers([request["prompt"]], request["max_tokens"], 1)
                return answer
            case "fleet":
                return {
                    "answers": self._answers(request["prompts"], request["max_tokens"], request["in_flight"])
                }
            case "play":
                found = play(request["sessions"], self._add, self._step, time.perf_counter, time.sleep)
                return {"sessions": found, "counts": _counts(self._engine)}
            case "settle":
                return {"saved_s": self._settle()}
            case "reset":
                return {"is_empty": self._reset()}
            case "close":
                self._engine.engine_core.shutdown()
                self._servers.close()
                return {}
            case other:
                raise ValueError(f"no such request: {other}")

    def _answers(self, prompts: list[list[int]], max_tokens: int, in_flight: int) -> list[dict[str, Any]]:
        """Each prompt's answer, in order; its clock starts when it is handed to the engine."""
        sampling = self._sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        waiting = list(enumerate(prompts))[::-1]
        found: list[dict[str, Any]] = [{} for _ in prompts]
        running: dict[str, tuple[int, float]] = {}
        while waiting or running:
            while waiting and len(running) < in_flight:
                index, prompt = waiting.pop()
                name, self._serial = str(self._serial), self._serial + 1
                running[name] = (index, time.perf_counter())
                self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                index, begin = running[output.request_id]
                answer, ids = found[index], list(output.outputs[0].token_ids)
                if ids:
                    answer.setdefault("ttft_s", now - begin)
                    answer.setdefault("first", len(ids))
                if output.finished:
                    del running[output.request_id]
                    rest = now - begin - answer["ttft_s"]
                    each = len(ids) - answer.pop("first")
                    answer |= {
                        "tpot_s": rest / each if each else None,
                        "token_ids": ids,
                        "cached": output.num_cached_tokens or 0,
                        "sources": _sources(output),
                    }
        return found

    def _add(self, turn: dict[str, Any]) -> str:
        """Hand a session's turn to the engine; `params` are what its client says to connectors."""
        said = {"extra_args": {"kv_transfer_params": turn["params"]}} if turn.get("params") else {}
        sampling = self._sampling(
            temperature=0, max_tokens=turn["max_tokens"], ignore_eos=True, detokenize=False, **said
        )
        name, self._serial = str(self._serial), self._serial + 1
        self._engine.add_request(name, {"prompt_token_ids": turn["prompt"]}, sampling)
        return name

    def _step(self) -> list[tuple[str, int, dict[str, Any] | None]]:
        """See `open_loop.Step`."""
        found: list[tuple[str, int, dict[str, Any] | None]] = []
        for output in self._engine.step():
            ids = list(output.outputs[0].token_ids)
            answer = None
            if output.finished:
                answer = {"token_ids": ids, "cached": output.num_cached_tokens or 0}
                answer |= {"sources": _sources(output), "hints": _said(output).get("hints")}
            found.append((output.request_id, len(ids), answer))
        return found

    def _reset(self) -> bool:
        """Whether vLLM's cache is empty: it is not as long as a connector that still saves holds blocks."""
        until = time.monotonic() + SETTLE_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > until:
                return False
            self._idle()
        return True

    def _settle(self) -> float | None:
        """Seconds until our connector has let go of every block it saves; None for another connector."""
        start = time.monotonic()
        pending = _pending()
        saved = None
        if pending is not None:
            while len(pending) and time.monotonic() < start + SETTLE_S:
                time.sleep(0.002)
            saved = time.monotonic() - start
        for _ in range(NUDGES):
            self._answers([self._nudge], 2, 1)
            self._idle()
        return saved

    def _idle(self) -> None:
        """Step without a request: so a connector that still holds blocks of ended ones lets them go."""
        until = time.monotonic() + QUIET_S
        while time.monotonic() < until:
            self._engine.step()
            time.sleep(0.01)


def _sources(output: Any) -> dict[str, int] | None:
    """Where our connector says that the prompt's tokens came from."""
    return _said(output).get("tokens")


def _said(output: Any) -> dict[str, Any]:
    """By our connector, of a request; nothing by another one."""
    return (getattr(output, "kv_transfer_params", None) or {}).get("workmem") or {}


def _counts(engine: Any) -> dict[str, int]:
    """What our connector, its levers and our scheduler class did; nothing of others."""
    scheduler = getattr(getattr(engine.engine_core, "engine_core", None), "scheduler", None)
    side = getattr(getattr(scheduler, "connector", None), "_scheduler", None)
    levers = getattr(side, "levers", None)
    counting = (side, levers, getattr(levers, "pins", None), getattr(scheduler, "_admitting", None))
    return {name: count for one in counting for name, count in getattr(one, "counts", {}).items()}


def _pending() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group  # noqa: PLC0415

    worker = getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
    return getattr(worker, "_pending", None)


def load(options: dict[str, Any]) -> tuple[dict[str, Any], Handle]:
    """Start the servers, then the engine."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": options["cores"],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": options.get("log", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    # The connectors of this tree, whatever else is installed; a peer's packages stand behind vLLM's own.
    sys.path.insert(0, options["source"])
    sys.path += options.get("packages", [])
    servers = Servers(options.get("servers", []))
    try:
        engine = Engine(options, servers)
    except BaseException:
        servers.close()
        raise
    import torch  # noqa: PLC0415

    about = {name: metadata.version(name) for name in options.get("versions", []) if _is_known(name)}
    for name in ("vllm", "torch"):
        about[name] = importlib.import_module(name).__version__
    return about | {"threads": torch.get_num_threads(), "block_tokens": engine.block_tokens}, engine.handle


def _is_known(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    serve_requests(load)
