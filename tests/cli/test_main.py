"""Every failure is one line and an exit code."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from workmem.cli import commands
from workmem.cli import main as cli
from workmem.cli.main import main
from workmem.core.errors import EngineError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def failing(monkeypatch):
    """Make `workmem version` raise."""

    def install(error: BaseException):
        def version():
            raise error

        monkeypatch.setattr("workmem.cli.version.version", version)
        # The command is resolved once; a fresh app resolves it anew.
        fresh = commands.App(name="workmem", suppress_keyboard_interrupt=False)
        fresh.command("workmem.cli.version:version", name="version")
        monkeypatch.setattr(commands, "app", fresh)

    return install


def one_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("workmem: ")
    return err


def test_commands_that_work_return_zero(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("workmem ")


@pytest.mark.parametrize(
    "words",
    [
        ["nosuch"],
        ["serve", "--bogus"],
        ["config", "check", "--set", "engine.dtype=x"],
        ["explain"],
        ["model", "prepare"],
        ["demo", "--agents", "0"],
        ["demo", "--concurrency=0"],
    ],
)
def test_a_wrong_command_line_or_setting_is_two(words, capsys):
    assert main(words) == 2
    one_line(capsys)


@pytest.mark.parametrize("name", ["no/such/folder", "nosuchmodel"])
def test_a_model_that_is_not_there_is_named(name, capsys):
    assert main(["model", "prepare", name]) == 2
    assert name in one_line(capsys)


def test_our_errors_are_one_line(failing, capsys):
    failing(EngineError("it stopped"))
    assert main(["version"]) == 1
    assert "it stopped" in one_line(capsys)


def test_a_bug_of_ours_is_one_line_unless_its_trace_is_asked_for(failing, capsys):
    failing(ZeroDivisionError("by zero"))
    assert main(["version"]) == 1
    assert "unexpected ZeroDivisionError: by zero" in one_line(capsys)
    with pytest.raises(ZeroDivisionError):
        main(["version", "--traceback"])


def test_an_interrupt_is_not_an_error(failing, capsys):
    failing(KeyboardInterrupt())
    assert main(["version"]) == 130
    assert capsys.readouterr().err == ""


def test_a_missing_extra_names_the_command_that_installs_it(failing, capsys):
    failing(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert main(["version"]) == 2
    assert (
        "torch is not installed; run in the folder of workmem: python -m pip install '.[engine]'"
        in one_line(capsys)
    )


@pytest.mark.parametrize(
    ("words", "code"), [("serve", 2), ("serve --help", 0), ("demo", 2), ("model list", 0)]
)
def test_a_command_that_cannot_be_loaded_names_what_is_missing(words, code, tmp_path):
    for name in ("starlette", "aiohttp", "torch", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from workmem.cli.main import main; sys.exit(main())",
            *words.split(),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    if code:
        assert re.fullmatch(r"workmem: \w+ is not installed; run in the folder .*\n", done.stderr)


def test_every_optional_library_names_its_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {
        re.match(r"[\w-]+", line)[0].replace("-", "_"): extra
        for extra in ("cli", "serve", "engine")
        for line in project["optional-dependencies"][extra]
    }
    assert wanted == cli._EXTRA_OF


def test_a_reader_that_goes_away_is_no_traceback():
    command = f"{sys.executable} -m workmem config reference | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_config_show_is_a_configuration(capsys):
    assert main(["config", "show", "--set", "engine.threads=3", "--set", "store.ssd.enabled=false"]) == 0
    Path("shown.toml").write_text(capsys.readouterr().out)
    assert main(["config", "show", "--config", "shown.toml"]) == 0
    assert capsys.readouterr().out == Path("shown.toml").read_text()
    assert main(["config", "show", "--set", "engine.threads=3", "--origin"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "threads = 3  # --set engine.threads=3" in lines
    assert 'dtype = "bf16"  # default' in lines


def test_a_port_in_use_is_told_before_a_model_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--set", f"server.port={port}", "--set", "engine.model=nosuch"]) == 2
    assert f"127.0.0.1:{port}" in one_line(capsys)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_upstream_mode_serves_without_torch_and_stops_when_told(name):
    code = (
        "import sys; from workmem.cli.main import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    settings = ["server.port=0", "upstream.urls=http://127.0.0.1:9"]
    command = [sys.executable, "-c", code, "serve", *(word for text in settings for word in ("--set", text))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            told = next(line for line in server.stderr if "listening on http://127.0.0.1:" in line)
            assert "/v1" in told
            server.send_signal(getattr(signal, name))
            rest = server.stderr.read()
            assert server.wait(20) == 0, rest
            assert "Traceback" not in rest
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)


def test_config_show_writes_quotas_that_can_be_read_again(capsys):
    Path("quotas.toml").write_text('[store.quotas."acme/batch"]\ndram_ceiling = "1GiB"\n')
    assert main(["config", "show", "--config", "quotas.toml"]) == 0
    shown = capsys.readouterr().out
    assert '"dram_ceiling" = "1GiB"' in shown
    Path("shown.toml").write_text(shown)
    assert main(["config", "show", "--config", "shown.toml"]) == 0
    assert capsys.readouterr().out == shown
