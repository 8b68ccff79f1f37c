"""SUPPORT.toml, the versions that the connector takes, and the snapshots of what is used of vLLM agree."""

import ast
import tomllib
from pathlib import Path

import msgspec
import pytest

from workmem.engines.vllm.versions import SUPPORTED, minor_of, refusal
from workmem.testing.signatures import MISSING, Snapshot, differences

ROOT = Path(__file__).parents[2]
SUPPORT = tomllib.loads((ROOT / "SUPPORT.toml").read_text(encoding="utf-8"))["vllm"]
VERSIONS = {version["minor"]: version for version in SUPPORT["version"]}
TOUCHED = tomllib.loads((ROOT / "engine_tests" / "with_vllm" / "touched.toml").read_text(encoding="utf-8"))


def snapshot_of(minor: str) -> Snapshot:
    return msgspec.json.decode((ROOT / VERSIONS[minor]["snapshot"]).read_bytes(), type=Snapshot)


def imports() -> set[tuple[str, str]]:
    """Module and name of all that is imported from vLLM."""
    return {
        (node.module, alias.name)
        for path in (ROOT / "src" / "workmem" / "plugins").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


def test_the_versions_that_are_taken_are_the_listed_ones():
    assert tuple(VERSIONS) == SUPPORTED
    assert {version["evidence"] for version in VERSIONS.values()} <= {"run", "signatures"}
    assert any(version["evidence"] == "run" for version in VERSIONS.values())
    assert {path["evidence"] for path in SUPPORT["path"]} <= {"run", "signatures", "untested"}


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "0.3.2", "dev"])
def test_any_other_version_is_refused_by_its_name_with_what_to_do(version: str):
    said = refusal(version)
    assert version in said
    assert all(minor in said for minor in SUPPORTED)
    assert "install" in said
    assert not refusal("0.32.7+cpu")


@pytest.mark.parametrize("minor", SUPPORTED)
def test_a_version_has_its_snapshot_of_all_that_is_used(minor):
    taken = snapshot_of(minor)
    assert minor_of(taken.version) == minor
    wanted = {f"{file}:{name}" for file, names in TOUCHED.items() for name in names}
    assert taken.names.keys() == wanted
    assert {
        f"{name}.{member}" for name, all_ in taken.names.items() for member in all_ if all_[member] == MISSING
    } == set()
    listed = {
        (f"{file}:{name}", member)
        for file, names in TOUCHED.items()
        for name, members in names.items()
        for member in members
        if member != "*"
    }
    assert {pair for pair in listed if pair[1] not in taken.names[pair[0]]} == set()


def test_all_that_later_versions_changed_is_known_and_judged():
    first = next(minor for minor, version in VERSIONS.items() if version["evidence"] == "run")
    changed = {}
    for minor, version in VERSIONS.items():
        if version["evidence"] == "signatures":
            changed |= differences(snapshot_of(first), snapshot_of(minor))
    judged = {change["name"]: change["why"] for change in SUPPORT["changed"]}
    news = {name: what for name, what in changed.items() if name not in judged}
    assert not news, "judge each, then list it in SUPPORT.toml:\n" + "\n".join(
        f"{n}: {w}" for n, w in news.items()
    )
    assert judged.keys() == changed.keys()
    assert all(judged.values())


def test_all_that_is_imported_of_vllm_is_in_the_snapshots():
    used = {name for names in TOUCHED.values() for name in names}
    # `current_platform` is an instance of Platform; a version is read by its number.
    known = used | {"current_platform", "__version__"}
    assert len(imports()) > 5
    assert {pair for pair in imports() if pair[1] not in known} == set()


def overrides() -> list[tuple[str, str, ast.FunctionDef]]:
    """Class of vLLM, method of it, and ours in its place."""
    return [
        (base.id, node.name, node)
        for path in sorted((ROOT / "src" / "workmem" / "plugins").glob("*.py"))
        for cls in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(cls, ast.ClassDef)
        for base in cls.bases
        if isinstance(base, ast.Name)
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name != "__init__"
    ]


@pytest.mark.parametrize("minor", SUPPORTED)
def test_what_is_overridden_takes_the_arguments_of_every_version(minor):
    classes = {name.partition(":")[2]: members for name, members in snapshot_of(minor).names.items()}
    checked = 0
    for base, name, ours in overrides():
        said = classes.get(base, {}).get(name, "")
        if "def(" not in said:
            continue
        theirs = ast.parse(f"def f{said[said.index('def(') + 3 :]}: ...").body[0]
        assert isinstance(theirs, ast.FunctionDef)
        wanted = [argument.arg for argument in [*theirs.args.args, *theirs.args.kwonlyargs]]
        taken = [argument.arg for argument in [*ours.args.args, *ours.args.kwonlyargs]]
        assert wanted == taken[: len(wanted)], f"vLLM {minor}: {base}.{name}{said}"
        assert len(ours.args.args) - len(ours.args.defaults) <= len(wanted), (
            f"vLLM {minor}: {base}.{name}{said}"
        )
        assert ours.args.kwarg or not theirs.args.kwarg, f"vLLM {minor}: {base}.{name}{said}"
        checked += 1
    assert checked > 20
