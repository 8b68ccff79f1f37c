"""What is promised about imports, layers, versions and events."""

import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import msgspec

import workmem
from workmem.core import events

ROOT = Path(__file__).parents[2]
IMPORT_MS_MAX = 60


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_importing_workmem_costs_next_to_nothing_and_loads_no_arrays():
    code = (
        "import sys, time; t = time.perf_counter(); import workmem; ms = (time.perf_counter() - t) * 1e3;"
        "print(ms, *sorted({'numpy', 'torch', 'transformers'} & set(sys.modules)))"
    )
    readings = [run(sys.executable, "-c", code).stdout.split() for _ in range(3)]
    assert all(len(reading) == 1 for reading in readings), readings
    assert min(float(reading[0]) for reading in readings) < IMPORT_MS_MAX


def test_the_command_line_answers_without_torch():
    code = (
        "import sys; from workmem.cli.main import main; assert main(['--help']) == 0; assert main(['version']) == 0;"
        "sys.exit('torch' in sys.modules)"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_imports_point_down_only():
    done = run(str(Path(sysconfig.get_path("scripts")) / "lint-imports"), "--no-cache")
    assert done.returncode == 0, done.stdout


def test_version_and_changelog_agree():
    released = re.sub(r"\.dev\d+$", "", workmem.__version__)
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings
    assert headings[0] == (released if released == workmem.__version__ else f"{released}.dev")


def test_every_event_says_what_happened():
    kinds = [
        value
        for value in vars(events).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == events.__name__
    ]
    assert len(kinds) > 5
    assert [kind.__name__ for kind in kinds if not (kind.__doc__ or "").strip()] == []


def test_the_core_depends_on_three_libraries():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [re.match(r"[\w-]+", line)[0] for line in project["dependencies"]] == [
        "msgspec",
        "numpy",
        "xxhash",
    ]


def test_the_reference_of_settings_is_the_one_of_the_code():
    done = run(sys.executable, "-m", "workmem", "config", "reference")
    assert done.returncode == 0, done.stderr
    assert (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8") == done.stdout, (
        "run: make docs"
    )
