"""The command that starts vLLM's server with the connector in it: what is added to a user's own arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from workmem.core.errors import ConfigError
from workmem.engines.vllm.refusals import ONE_ONLY

COMMAND = ("vllm.entrypoints.cli.main", "serve")
"""The `vllm serve` of a package called `vllm`."""
MODULE_ALONE = ("vllm.entrypoints.openai.api_server",)
"""The same server in packages of another name, where that command does not start. It takes the model as an option."""
CONNECTOR = "WorkmemConnector"
MODULE = "workmem.plugins.vllm"
_TRANSFER = "--kv-transfer-config"
_HASHING = "--prefix-caching-hash-algo"
_DETAILS = "--enable-prompt-tokens-details"
_PROVEN = ("sha256", "sha256_cbor")
"""Names of hashes that are a proof of what is in a block; `sha256_cbor` is the one that others can compute too."""
_SECTIONS = ("store", "vllm")
_ONE_ONLY = {
    "pipeline_parallel_size": ("--pipeline-parallel-size", "-pp"),
    "decode_context_parallel_size": ("--decode-context-parallel-size", "-dcp"),
    "prefill_context_parallel_size": ("--prefill-context-parallel-size", "-pcp"),
}
_IN_FILE = re.compile(
    r"^\s*(?:kv[-_](?:transfer|offloading)|(?:no[-_])?enable[-_]prefix[-_]caching)[\w-]*\s*:", re.MULTILINE
)


def server_command(
    python: str,
    words: Sequence[str],
    sets: Sequence[str],
    *,
    is_command: bool,
    files: Mapping[str, str] | None = None,
) -> list[str]:
    """The command: the user's own words as they are, and what the connector needs.

    `words`: what was said behind `workmem vllm serve`. `sets`: `store.x=y` and `vllm.x=y`. `is_command`: whether
    `vllm serve` starts with this Python. `files`: text of the files named by `--config`, by name. Raises ConfigError
    where the user's words and the connector cannot both be had.
    """
    own = list(words)
    if not is_command:
        own = _with_model_option(own)
    _refuse(own, files or {})
    given = _take(own, _TRANSFER)
    config = _own(_settings(sets)) if given is None else _merged(given, _settings(sets))
    own += [_TRANSFER, msgspec.json.encode(config).decode()]
    hashing = _value(own, _HASHING)
    if hashing is None:
        own += [_HASHING, _PROVEN[-1]]
    elif hashing not in _PROVEN:
        raise ConfigError(
            f"{_HASHING} {hashing} is no proof of what is in a block; leave it out, or say {' or '.join(_PROVEN)}"
        )
    if not any(_name(word) in (_DETAILS, "--no-enable-prompt-tokens-details") for word in own):
        own.append(_DETAILS)
    return [python, "-m", *(COMMAND if is_command else MODULE_ALONE), *own]


def shown(command: Sequence[str]) -> str:
    """A command as a shell takes it."""
    return shlex.join(command)


def _with_model_option(words: list[str]) -> list[str]:
    if any(_name(word) == "--model" for word in words):
        return words
    if not words or words[0].startswith("-"):
        raise ConfigError("name the model first: workmem vllm serve MODEL ...")
    # In one word: vLLM puts what a file of arguments says behind the first.
    return [f"--model={words[0]}", *words[1:]]


def _refuse(words: Sequence[str], files: Mapping[str, str]) -> None:
    """What cannot work: told here, and not after a minute in vLLM's log."""
    for word in words:
        name = _name(word)
        if name == "--no-enable-prefix-caching":
            raise ConfigError(
                "--no-enable-prefix-caching: contexts are kept under the block hashes of vLLM's prefix cache; leave it out"
            )
        if name == "--kv-offloading-size":
            raise ConfigError(
                "--kv-offloading-size puts another connector in the place of workmem's: leave it out, and set "
                "--set store.dram.bytes=... instead"
            )
        if name.startswith(f"{_TRANSFER}."):
            raise ConfigError(
                f"{name}: write {_TRANSFER} as one piece of JSON, so that workmem can be added to it"
            )
    for field, options in _ONE_ONLY.items():
        for option in options:
            value = _value(words, option)
            if value is not None and value != "1":
                raise ConfigError(f"{option} {value} cannot be had with workmem: {ONE_ONLY[field]}")
    for file, text in files.items():
        found = _IN_FILE.search(text)
        if found:
            raise ConfigError(
                f"{file} sets {found[0].strip(' :')}, which workmem has to see: give it on the command line"
            )


def _settings(sets: Sequence[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for text in sets:
        path, _, value = text.partition("=")
        if path.split(".")[0] not in _SECTIONS:
            raise ConfigError(
                f"--set {path}: inside vLLM only {' and '.join(f'[{name}]' for name in _SECTIONS)} are read"
            )
        settings[path] = value
    return settings


def _own(settings: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    return config | ({"kv_connector_extra_config": settings} if settings else {})


def _with_role(theirs: Mapping[str, Any], settings: dict[str, str]) -> dict[str, Any]:
    """Ours as somebody wrote it: a server that is to prefill, or to decode, does not do both."""
    role = {key: value for key, value in theirs.items() if key == "kv_role"}
    return _own(_extra(theirs) | settings) | role


def _merged(text: str, settings: dict[str, str]) -> dict[str, Any]:
    """The user's own connector and ours, theirs first: vLLM loads from the first that has something, and saves to all."""
    try:
        theirs = msgspec.json.decode(text.encode(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{_TRANSFER} is not a JSON object: {error}") from None
    if theirs.get("kv_load_failure_policy") == "fail":
        raise ConfigError(
            f"{_TRANSFER} has kv_load_failure_policy fail, with which a page that cannot be loaded fails a request; "
            "say recompute, or leave it out"
        )
    if _is_ours(theirs):
        own = _with_role(theirs, settings)
        return own | {key: value for key, value in theirs.items() if key not in _own({"": ""})}
    if "kv_connector" not in theirs:
        raise ConfigError(f"{_TRANSFER} names no kv_connector: leave it out, or name one")
    outer: dict[str, Any] = {"kv_role": "kv_both"}
    if theirs["kv_connector"] == "MultiConnector":
        outer |= theirs
        extra = dict(_extra(theirs))
        children = cast("list[dict[str, Any]]", extra.get("connectors") or [])
    else:
        # vLLM hands one engine id to all children, and refuses a child with its own.
        outer |= {key: theirs[key] for key in ("engine_id",) if key in theirs}
        children, extra = [{key: value for key, value in theirs.items() if key != "engine_id"}], {}
    children = [_with_role(child, settings) if _is_ours(child) else child for child in children]
    if not any(_is_ours(child) for child in children):
        children.append(_own(settings))
    extra["connectors"] = children
    return outer | {
        "kv_connector": "MultiConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _is_ours(config: Mapping[str, Any]) -> bool:
    return config.get("kv_connector_module_path") == MODULE


def _extra(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(config.get("kv_connector_extra_config") or {})


def _name(word: str) -> str:
    """A word's option, as vLLM takes it: with dashes, and `=value` cut off."""
    if not word.startswith("-") or word.lstrip("-")[:1].isdigit():
        return ""
    head, dot, rest = word.partition("=")[0].partition(".")
    return head.replace("_", "-") + dot + rest


def _value(words: Sequence[str], option: str) -> str | None:
    """The value of an option; the last counts."""
    found = None
    for index, word in enumerate(words):
        if _name(word) == option:
            _, equals, value = word.partition("=")
            found = value if equals else (words[index + 1] if index + 1 < len(words) else "")
    return found


def _take(words: list[str], option: str) -> str | None:
    """The value of an option, which is taken out of `words`."""
    found = _value(words, option)
    index = 0
    while index < len(words):
        if _name(words[index]) == option:
            del words[index : index + (1 if "=" in words[index] else 2)]
        else:
            index += 1
    return found
