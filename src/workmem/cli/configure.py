"""`workmem config`: what is set, and by whom."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, cast

import msgspec
from cyclopts import Parameter

from workmem.cli.options import ConfigFile, Settings
from workmem.cli.reference import reference_page
from workmem.config import Config, LoadedConfig, is_section, load


def show(
    *,
    config: ConfigFile = None,
    sets: Settings = (),
    origin: Annotated[
        bool, Parameter(negative=(), help="Say behind each setting which source set it.")
    ] = False,
) -> None:
    """Print every setting as TOML, so that the output is itself a configuration."""
    loaded = load(config, sets=sets)
    sys.stdout.writelines(f"{line}\n" for line in _toml(loaded, loaded.config, (), origins=origin))


def check(*, config: ConfigFile = None, sets: Settings = ()) -> None:
    """Read all sources and say whether they are sound; exit code 2 when not."""
    loaded = load(config, sets=sets)
    for name, meant in loaded.unread.items():
        sys.stdout.write(f"{name} is not read; for this setting write {meant}\n")
    sys.stdout.write(f"the configuration is sound ({len(loaded.origins)} set, the rest by default)\n")


def reference() -> None:
    """Print the reference page of all settings as Markdown."""
    sys.stdout.write(reference_page(Config))


def _toml(
    loaded: LoadedConfig, section: msgspec.Struct, path: tuple[str, ...], *, origins: bool
) -> Iterator[str]:
    fields = msgspec.structs.fields(type(section))
    if path:
        yield f"\n[{'.'.join(path)}]"
    for field in fields:
        if not is_section(field.type):
            text = f"{field.name} = {_value(msgspec.to_builtins(getattr(section, field.name)))}"
            yield f"{text}  # {loaded.origin('.'.join((*path, field.name)))}" if origins else text
    for field in fields:
        if is_section(field.type):
            child = cast("msgspec.Struct", getattr(section, field.name))
            yield from _toml(loaded, child, (*path, field.name), origins=origins)


def _value(value: object) -> str:
    if isinstance(value, dict):
        inside = (
            f"{json.dumps(key)} = {_value(held)}" for key, held in cast("dict[str, object]", value).items()
        )
        return f"{{{', '.join(inside)}}}"
    # JSON's strings, numbers, booleans and arrays are TOML's.
    return json.dumps(value, ensure_ascii=False)
