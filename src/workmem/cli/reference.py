"""The reference page of all settings, made from their declarations so that it cannot drift."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from typing import cast

import msgspec

from workmem.config import ENVIRONMENT_PREFIX, is_section

_HEAD = """\
# Configuration

Written by `make docs` from the declarations in the code; do not edit.

Sources, later wins: defaults, `workmem.toml` (or the file named by `--config`), the environment
(`{prefix}SECTION__KEY`), `--set section.key=value`. An unknown key or a value out of range stops the start.
`workmem config show --origin` prints what is in force and who set it.
"""


def reference_page(root: type[msgspec.Struct]) -> str:
    """Markdown of every section below `root`: key, type, default, meaning."""
    return "\n".join([_HEAD.format(prefix=ENVIRONMENT_PREFIX), *_section(root, ())]) + "\n"


def _section(struct: type[msgspec.Struct], path: tuple[str, ...]) -> list[str]:
    fields = msgspec.structs.fields(struct)
    plain = [field for field in fields if not is_section(field.type)]
    meanings = _meanings(struct)
    lines: list[str] = []
    if plain:
        lines += [f"## `[{'.'.join(path)}]`" if path else "## Top level", ""]
        lines += ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{field.name}` | {_values(field.type)} | `{_default(field)}` | {meanings.get(field.name, '')} |"
            for field in plain
        ]
        lines.append("")
    for field in fields:
        if is_section(field.type):
            lines += _section(field.type, (*path, field.name))
    return lines


def _meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Take the string below each field of the class body."""
    body = cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]).body
    meanings: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            meanings[field.target.id] = " ".join(str(below.value.value).split()).replace("|", "\\|")
    return meanings


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return json.dumps(field.default)
    return "{}" if field.default_factory is dict else "[]"


def _values(kind: object) -> str:
    return _describe(msgspec.inspect.type_info(kind))


def _describe(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in info.values)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            name = "integer" if isinstance(info, msgspec.inspect.IntType) else "number"
            bounds = (("at least", info.ge), ("above", info.gt), ("at most", info.le), ("below", info.lt))
            return " ".join([name, *(f"{word} {bound}" for word, bound in bounds if bound is not None)])
        case msgspec.inspect.StrType():
            return f"text matching `{info.pattern}`".replace("|", "\\|") if info.pattern else "text"
        case msgspec.inspect.BoolType():
            return "true, false"
        case msgspec.inspect.UnionType():
            return " or ".join(_describe(part) for part in info.types)
        case msgspec.inspect.VarTupleType():
            return f"list of {_describe(info.item_type)}"
        case msgspec.inspect.DictType():
            return f"table of {_describe(info.value_type)}"
        case msgspec.inspect.StructType():
            return "tables"
        case _:
            return type(info).__name__.removesuffix("Type").lower()
