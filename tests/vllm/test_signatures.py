"""Signatures are read from source, in a folder or a wheel, and every change of what is used shows."""

import json
import zipfile

import pytest

from workmem.testing.signatures import MISSING, Snapshot, differences, main, take

SOURCE = """
import enum
from typing import Generic

def seed(name: str, *, salt: bytes = b"") -> int: ...

LIMIT: int = 3

class Plan(Base, kw_only=True):
    count: int = 0
    KIND = "plain"

    def __init__(self, size: int) -> None:
        self.size: int = size
        self._inner = size

    if True:
        @property
        def full(self) -> bool: ...

    def _hidden(self): ...
"""
TOUCHED = {"pkg/mod.py": {"Plan": ["*"], "seed": [], "LIMIT": []}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text(SOURCE)
    (tmp_path / "pkg" / "_version.py").write_text("__version__ = version = '1.2.3'\n")
    return tmp_path


def of(folder, touched=TOUCHED) -> Snapshot:
    return take(folder, touched, version_file="pkg/_version.py")


def test_all_that_is_public_is_read(folder):
    taken = of(folder)
    assert taken.version == "1.2.3"
    assert taken.names["pkg/mod.py:Plan"] == {
        "": "class(Base, kw_only=True)",
        "KIND": "= 'plain'",
        "__init__": "def(self, size: int) -> None",
        "count": "field: int = 0",
        "full": "@property def(self) -> bool",
        "size": "attribute: int",
    }
    assert taken.names["pkg/mod.py:seed"] == {"": "def(name: str, *, salt: bytes=b'') -> int"}
    assert taken.names["pkg/mod.py:LIMIT"] == {"": "field: int = 3"}


def test_members_that_are_listed_are_read_private_ones_too(folder):
    taken = of(folder, {"pkg/mod.py": {"Plan": ["_hidden", "_inner"]}})
    assert taken.names["pkg/mod.py:Plan"] == {
        "": "class(Base, kw_only=True)",
        "_hidden": "def(self)",
        "_inner": "attribute: set",
    }


def test_what_is_gone_is_missing(folder):
    taken = of(folder, {"pkg/mod.py": {"Plan": ["gone"], "Other": ["*"]}, "pkg/none.py": {"f": []}})
    assert taken.names["pkg/mod.py:Plan"]["gone"] == MISSING
    assert taken.names["pkg/mod.py:Other"] == {"": MISSING}
    assert taken.names["pkg/none.py:f"] == {"": MISSING}


def test_a_wheel_reads_as_its_folder(folder, tmp_path):
    wheel = tmp_path / "pkg-1.2.3.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("pkg/mod.py", "pkg/_version.py"):
            file.write(folder / name, name)
    assert of(wheel) == of(folder)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("size: int) ->", "size: int, more: int = 0) ->", "pkg/mod.py:Plan.__init__"),
        ("count: int = 0", "count: int = 1", "pkg/mod.py:Plan.count"),
        ("Plan(Base,", "Plan(Other,", "pkg/mod.py:Plan"),
        ("def full", "def fuller", "pkg/mod.py:Plan.full"),
        ("salt: bytes", "salt: str", "pkg/mod.py:seed"),
    ],
)
def test_every_change_shows(folder, before, after, name):
    first = of(folder)
    file = folder / "pkg" / "mod.py"
    file.write_text(file.read_text().replace(before, after))
    assert name in differences(first, of(folder))
    assert differences(first, first) == {}


def test_a_snapshot_is_printed_and_what_is_missing_said(folder, tmp_path, capsysbinary):
    touched = tmp_path / "touched.toml"
    touched.write_text('["pkg/mod.py"]\nPlan = ["count"]\n')
    assert main([str(touched), str(folder), "pkg/_version.py"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["names"]["pkg/mod.py:Plan"]["count"] == "field: int = 0"
    touched.write_text('["pkg/mod.py"]\nPlan = ["gone"]\n')
    assert main([str(touched), str(folder), "pkg/_version.py"]) == 1
    assert b"pkg/mod.py:Plan" in capsysbinary.readouterr().err
