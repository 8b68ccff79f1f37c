"""What is said of the traps: by us, and by linters of prompts that others have written."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prompt_traps import CONTROL, Trap

from workmem.prompt.causes.diagnose import diagnose
from workmem.prompt.dialects.places import Dialect

OURS = "workmem"
TEMPLATE = Path(__file__).parent / "prompt_template.jinja"
"""For models whose own template knows no tools: it prints them first."""
_WORKER = Path(__file__).parent / "workers" / "prompt_linter.py"
_TIMEOUT_S = 600.0
_OF_A_TEXT = {"a clock in line one", "a date in line one", "a uuid in line one"}

NAMING: dict[str, dict[str, set[str]]] = {
    "kvlint": {
        "key_order": {"keys of schemas in another order"},
        "dynamic_time": {"a clock in line one", "a date in line one"},
        "dynamic_id": {"a uuid in line one"},
        "whitespace_drift": {"one space more"},
    },
    "cachelint": {"prompt_inserted": {"a new tool in front"}},
    "prefixguard": {
        "TOOL_REORDER": {"tools in another order"},
        "TOOL_SET_CHANGED": {"a new tool in front"},
        "TOOL_SCHEMA_DRIFT": {"`required` in another order", "keys of schemas in another order"},
        "NON_DETERMINISTIC_SERIALIZATION": {
            "keys of schemas in another order",
            "`required` in another order",
            "arguments of a call written another way",
        },
        "HISTORY_DROP": {"history trimmed"},
        "VOLATILE_CONTENT": _OF_A_TEXT,
    },
    "promptcachelint": {"CL012": _OF_A_TEXT},
}
"""Words of each linter that tell what happened, not just that and where something differs; read with good will."""


class Peer(NamedTuple):
    """A linter in an environment of its own."""

    name: str
    python: Path


def ours(found: Sequence[Trap], dialect: Dialect) -> list[dict[str, Any]]:
    """Of each trap: the causes we name, and whether the first is the right one at the right place."""
    rows: list[dict[str, Any]] = []
    for trap in found:
        causes = diagnose(trap.before, trap.after, dialect)
        said = [[one.name, one.path] for one in causes]
        wanted = [[trap.cause, trap.path]] if trap.cause else []
        rows.append(
            {
                "trap": trap.name,
                "said": said,
                "what": causes[0].what if causes else "",
                "noticed": bool(said),
                "named": said[:1] == wanted,
                "fix": causes[0].fix if causes else "",
            }
        )
    return rows


def of_peer(peer: Peer, found: Sequence[Trap], folder: Path, model: Path) -> tuple[str, list[dict[str, Any]]]:
    """Its version, and what it says of each trap. Raises OSError where it does not run.

    It has noticed a trap when it says something that it does not say of the control.
    """
    pairs = folder / peer.name
    shutil.rmtree(pairs, ignore_errors=True)
    pairs.mkdir(parents=True)
    for number, trap in enumerate(found):
        (pairs / f"{number}.a.json").write_text(json.dumps(trap.before))
        (pairs / f"{number}.b.json").write_text(json.dumps(trap.after))
    command = command_of(peer, pairs, _with_tools(model, folder / "tokenizer"))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"it did not end within {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise OSError(done.stderr.strip()[-400:])
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer["version"], judged(peer.name, found, answer["said"])


def command_of(peer: Peer, pairs: Path, tokenizer: Path) -> list[str]:
    """What runs it."""
    return [str(peer.python), str(_WORKER), peer.name, str(pairs), str(tokenizer)]


def judged(name: str, found: Sequence[Trap], said: Sequence[Sequence[Sequence[str]]]) -> list[dict[str, Any]]:
    """Rows of what a peer says."""
    on_control = {tuple(one) for one in said[0]}
    rows: list[dict[str, Any]] = []
    for trap, words in zip(found, said, strict=True):
        new = [list(one) for one in words if tuple(one) not in on_control or trap.name == CONTROL]
        naming = NAMING.get(name, {})
        rows.append(
            {
                "trap": trap.name,
                "said": [list(one) for one in words],
                "noticed": bool(new),
                "named": not new
                if trap.name == CONTROL
                else any(trap.name in naming.get(one[0], ()) for one in new),
            }
        )
    return rows


def _with_tools(model: Path, folder: Path) -> Path:
    """A tokenizer of the same words, with a template that prints tools."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "config.json"):
        shutil.copyfile(model / name, folder / name)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE.read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
