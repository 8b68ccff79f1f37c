"""Entry point: run a command, turn every failure into one line and an exit code, never a traceback.

Exit codes: 0 done, 1 failed, 2 wrong command line or configuration, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from workmem.core.errors import ConfigError, WorkmemError

FAILED = 1
MISCONFIGURED = 2
INTERRUPTED = 130

_EXTRA_OF = {
    "cyclopts": "cli",
    "rich": "cli",
    "starlette": "serve",
    "uvicorn": "serve",
    "aiohttp": "serve",
    "prometheus_client": "serve",
    "torch": "engine",
    "transformers": "engine",
    "safetensors": "engine",
    "gguf": "engine",
    "accelerate": "engine",
    "jinja2": "engine",
    "llguidance": "engine",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` unless given) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    wants_traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    try:
        return _run(words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ConfigError as error:
        return _fail(str(error), MISCONFIGURED)
    except WorkmemError as error:
        return _fail(str(error), FAILED)
    # Thread main: whatever is left is our bug, and a person still gets one line.
    except Exception as error:
        if wants_traceback:
            raise
        if missing := _missing(error):
            name, extra = missing
            return _fail(
                f"{name} is not installed; run in the folder of workmem: python -m pip install '.[{extra}]' "
                "(or '.[all]', as make install does)",
                MISCONFIGURED,
            )
        return _fail(
            f"unexpected {type(error).__name__}: {error}; the same command with --traceback shows where",
            FAILED,
        )


def _run(words: Sequence[str]) -> int:
    # Loaded here, so that a missing extra is told like any other failure.
    from cyclopts import CycloptsError  # noqa: PLC0415

    from workmem.cli.commands import app  # noqa: PLC0415

    try:
        code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _fail(f"{' '.join(str(error).split())} (workmem --help lists what there is)", MISCONFIGURED)
    return code if isinstance(code, int) else 0


def _missing(error: BaseException | None) -> tuple[str, str] | None:
    """The library for want of which `error` arose, and its extra; a command that cannot be loaded says it further down."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            extra = _EXTRA_OF.get((error.name or "").split(".")[0])
            return (error.name or "", extra) if extra else None
        error = error.__cause__
    return None


def _fail(problem: str, code: int) -> int:
    print(f"workmem: {problem}", file=sys.stderr)  # noqa: T201  a terminal is what this module writes to
    return code
