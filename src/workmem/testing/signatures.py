"""What a package's source promises to whoever plugs into it, read without importing it.

Names, bases, fields and signatures as text, so that two versions are two JSON files and a change is a difference.
A package of others is read from a folder or from its wheel, as its own imports may need a machine we do not have.
"""

from __future__ import annotations

import ast
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

ALL = "*"
"""In a list of members: every public one, and the constructor."""
MISSING = "missing"

Members = dict[str, str]
Touched = Mapping[str, Mapping[str, list[str]]]
"""Source file to the names in it that are used, and of each class the members."""


class Snapshot(msgspec.Struct, frozen=True):
    """Of one version. `names`: `file:Name` to its members and what each is."""

    version: str
    names: dict[str, Members]


class Sources:
    """Python files of a package: below a folder of packages, or in a wheel."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._wheel = None if place.is_dir() else zipfile.ZipFile(place)

    def read(self, name: str) -> str:
        """Text of a file; empty where there is none."""
        try:
            if self._wheel is not None:
                return self._wheel.read(name).decode()
            return (self._place / name).read_text(encoding="utf-8")
        except (KeyError, FileNotFoundError):
            return ""


def take(place: Path, touched: Touched, *, version_file: str) -> Snapshot:
    """Read all that is touched. What is not there any more is `MISSING`."""
    sources = Sources(place)
    version = _version(sources.read(version_file))
    names: dict[str, Members] = {}
    for file, wanted in touched.items():
        module = ast.parse(sources.read(file))
        for name, members in wanted.items():
            names[f"{file}:{name}"] = _of(module, name, members)
    return Snapshot(version, names)


def differences(before: Snapshot, after: Snapshot) -> dict[str, str]:
    """`file:Name.member` to what it was and what it is now."""
    found: dict[str, str] = {}
    for name in sorted({*before.names, *after.names}):
        old, new = before.names.get(name, {}), after.names.get(name, {})
        for member in sorted({*old, *new}):
            was, now = old.get(member, MISSING), new.get(member, MISSING)
            if was != now:
                found[f"{name}.{member}" if member else name] = f"{was}  ->  {now}"
    return found


def _version(text: str) -> str:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if "__version__" in names:
                return str(node.value.value)
    return ""


def _of(module: ast.Module, name: str, members: list[str]) -> Members:
    node = next((node for node in _statements(module) if name in _names(node)), None)
    if node is None:
        return {"": MISSING}
    if not isinstance(node, ast.ClassDef):
        return {"": _text(node)}
    there = {member: _text(child) for child in _statements(node) for member in _names(child)}
    for member, text in _attributes(node):
        there.setdefault(member, text)
    wanted = [member for member in members if member != ALL]
    if ALL in members:
        wanted += [member for member in there if not member.startswith("_") or member == "__init__"]
    return {"": _head(node)} | {member: there.get(member, MISSING) for member in sorted(set(wanted))}


def _statements(node: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    """Of a body, also those under a condition."""
    waiting = list(node.body)
    while waiting:
        statement = waiting.pop(0)
        if isinstance(statement, ast.If):
            waiting = [*statement.body, *statement.orelse, *waiting]
        yield statement


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case _:
            return []


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """What the constructor sets: name and, where it says so, type."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name not in ("__init__", "__post_init__"):
            continue
        for child in ast.walk(method):
            targets = child.targets if isinstance(child, ast.Assign) else []
            if isinstance(child, ast.AnnAssign):
                targets = [child.target]
            kind = ast.unparse(child.annotation) if isinstance(child, ast.AnnAssign) else "set"
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    yield target.attr, f"attribute: {kind}"


def _head(node: ast.ClassDef) -> str:
    decorators = "".join(f"@{ast.unparse(one)} " for one in node.decorator_list)
    return f"{decorators}class({', '.join(ast.unparse(base) for base in [*node.bases, *node.keywords])})"


def _text(node: ast.stmt) -> str:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            decorators = "".join(f"@{ast.unparse(one)} " for one in node.decorator_list)
            word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            return f"{decorators}{word}({ast.unparse(node.args)}){returns}"
        case ast.ClassDef():
            return _head(node)
        case ast.AnnAssign(value=value):
            default = f" = {ast.unparse(value)}" if value else ""
            return f"field: {ast.unparse(node.annotation)}{default}"
        case ast.Assign(value=value):
            return f"= {ast.unparse(value)}"
        case _:
            return ast.unparse(node)


def main(arguments: list[str]) -> int:
    """`python -m workmem.testing.signatures TOUCHED.toml WHEEL_OR_FOLDER VERSION_FILE`: print a snapshot."""
    touched, place, version_file = arguments
    listed = tomllib.loads(Path(touched).read_text(encoding="utf-8"))
    snapshot = take(Path(place), listed, version_file=version_file)
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(snapshot), indent=1) + b"\n")
    missing = [name for name, members in snapshot.names.items() if MISSING in members.values()]
    if missing:
        sys.stderr.write(f"not found: {', '.join(missing)}\n")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
