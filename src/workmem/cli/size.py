"""`workmem size`: how much memory and disk the contexts of a fleet take."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.table import Table

from workmem.cli.options import ConfigFile, Settings
from workmem.cli.store_folder import console_out
from workmem.config import cache_dir, load
from workmem.core.errors import ConfigError
from workmem.core.layout import BLOCK_TOKENS
from workmem.core.units import format_bytes, parse_bytes
from workmem.engines.known_shapes import SHAPES, known_shape
from workmem.engines.kv_size import KV_BYTES, KVShape, Size, shape_from, size_of

_GIB = 1 << 30


def size(  # noqa: PLR0913 - the options of a command
    model: Annotated[
        str | None, Parameter(help="Folder with a config.json, or a name; left out, all names known.")
    ] = None,
    /,
    *,
    context: Annotated[str, Parameter(help="Tokens of a context: 32768 or 32k.")] = "32k",
    agents: Annotated[int, Parameter(help="Contexts at work at once: their pages belong in dram.")] = 10,
    sessions: Annotated[
        int | None, Parameter(help="Contexts that may come back, those at work too; ten for each agent.")
    ] = None,
    kv_dtype: Annotated[
        str, Parameter(help=f"What KV is kept in: {', '.join(KV_BYTES)}; that of the model if left out.")
    ] = "",
    tp: Annotated[int, Parameter(help="Tensor-parallel workers.")] = 1,
    dram: Annotated[str | None, Parameter(help="Size of dram; store.dram.bytes if left out.")] = None,
    ssd: Annotated[str | None, Parameter(help="Size of the ssd tier; store.ssd.bytes if left out.")] = None,
    block_tokens: Annotated[int, Parameter(help="Tokens of a block.")] = BLOCK_TOKENS,
    as_json: Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")] = False,
    config: ConfigFile = None,
    sets: Settings = (),
) -> None:
    """Say how many bytes of KV a model makes of a token, what dram and ssd hold of it, and what a fleet needs."""
    if model is None:
        _list(as_json=as_json)
        return
    for option, value in (("agents", agents), ("tp", tp), ("block-tokens", block_tokens)):
        if value < 1:
            raise ConfigError(f"--{option} {value}: at least 1")
    if kv_dtype and kv_dtype not in KV_BYTES:
        raise ConfigError(f"--kv-dtype {kv_dtype}: one of {', '.join(KV_BYTES)}")
    store = load(config, sets=sets).config.store
    shape = _shape(model)
    answer = size_of(
        shape,
        dtype=kv_dtype,
        workers=tp,
        block_tokens=block_tokens,
        context=_tokens(context),
        agents=agents,
        sessions=10 * agents if sessions is None else sessions,
        tiers={
            "dram": parse_bytes(dram if dram is not None else store.dram.bytes, "--dram"),
            "ssd": parse_bytes(ssd if ssd is not None else store.ssd.bytes, "--ssd"),
        },
    )
    if as_json:
        sys.stdout.write(f"{msgspec.json.encode(answer).decode()}\n")
        return
    _show(shape, answer, agents, 10 * agents if sessions is None else sessions)


def _show(shape: KVShape, answer: Size, agents: int, sessions: int) -> None:
    console = console_out()
    what = "a latent vector" if shape.is_latent else f"{shape.kv_heads} KV head{'s' * (shape.kv_heads > 1)}"
    console.print(
        f"{answer.model}: {shape.layers} layers, {what} of {shape.head_dim}, {answer.dtype}"
        + (f", {answer.workers} workers" if answer.workers > 1 else "")
    )
    table = Table(show_header=False, box=None)
    for name, count in (
        ("a token", answer.token_bytes),
        (f"a block of {answer.block_tokens} tokens", answer.block_bytes),
        (f"a context of {answer.context:,} tokens", answer.context_bytes),
    ):
        table.add_row(f"  {name}", f"{count:,} bytes", format_bytes(count))
    console.print(table)
    held = Table(box=None)
    for name in ("tier", "size", "tokens", "contexts"):
        held.add_column(name, justify="left" if name == "tier" else "right")
    for tier, fill in answer.tiers.items():
        held.add_row(tier, format_bytes(fill.bytes), f"{fill.tokens:,}", f"{fill.contexts:,}")
    console.print(held)
    whole = {setting: -(-count // _GIB) for setting, count in answer.advice.items()}
    console.print(f'{agents} contexts at work: store.dram.bytes = "{whole["store.dram.bytes"]}GiB"')
    console.print(
        f'{max(sessions, agents)} contexts to come back to: store.ssd.bytes = "{whole["store.ssd.bytes"]}GiB"'
    )
    console.print("What contexts share, as a system prompt, is kept once, and counted here for each.")
    if answer.note:
        console.print(f"[yellow]{answer.model} in vLLM: {answer.note}[/]")


def _list(*, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps({shape.name: shape.token_bytes() for shape in SHAPES.values()})}\n")
        return
    table = Table(box=None)
    for name in ("model", "layers", "KV heads", "head", "bf16", "fp8"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for shape in SHAPES.values():
        table.add_row(
            shape.name,
            str(shape.layers),
            "latent" if shape.is_latent else str(shape.kv_heads),
            str(shape.head_dim),
            *(f"{shape.token_bytes(dtype):,}" for dtype in ("bf16", "fp8")),
        )
    console = console_out()
    console.print(table)
    console.print("Bytes of KV a token. `workmem size MODEL` says what a fleet needs.")


def _shape(model: str) -> KVShape:
    folder = Path(model).expanduser()
    prepared = cache_dir() / "models" / model.lower()
    for place in (folder, prepared):
        file = place / "config.json"
        if file.is_file():
            try:
                described = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
                return shape_from(place.resolve().name, described)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{file} is not a model's configuration: {error}") from None
    found = known_shape(model)
    if found is None:
        raise ConfigError(
            f"{model!r} is no folder with a config.json, and no name known here; `workmem size` lists the names"
        )
    return found


def _tokens(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.replace(",", "").replace("_", ""))
    if match is None or not int(match[1]):
        raise ConfigError(f"--context {text}: a count of tokens, as 32768 or 32k")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]
