"""Sources, their order, and what a bad setting says."""

import subprocess
import sys
from pathlib import Path

import pytest

from workmem.config import Config, cache_dir, load
from workmem.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "workmem.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_nothing_set_gives_the_defaults():
    loaded = load(environ={})
    assert loaded.config == Config()
    assert loaded.origin("engine.dtype") == "default"


def test_later_sources_win_and_each_is_remembered():
    write('[engine]\ndtype = "fp32"\nthreads = 1\nqueue_max = 7\n')
    environ = {"WORKMEM__ENGINE__THREADS": "2", "WORKMEM__ENGINE__QUEUE_MAX": "8", "UNRELATED": "x"}
    loaded = load(environ=environ, sets=["engine.queue_max=9"])
    assert (loaded.config.engine.dtype, loaded.config.engine.threads, loaded.config.engine.queue_max) == (
        "fp32",
        2,
        9,
    )
    assert loaded.origin("engine.dtype") == "workmem.toml"
    assert loaded.origin("engine.threads") == "environment WORKMEM__ENGINE__THREADS"
    assert loaded.origin("engine.queue_max") == "--set engine.queue_max=9"


def test_a_named_file_replaces_the_one_of_the_folder():
    write("[engine]\nthreads = 1\n")
    other = write("[engine]\nqueue_max = 5\n", "other.conf")
    config = load(other, environ={}).config
    assert (config.engine.threads, config.engine.queue_max) == (0, 5)


def test_deep_sections_are_reached_from_all_sources():
    write('[store.dram]\nbytes = "1GiB"\n')
    config = load(environ={"WORKMEM__STORE__SSD__ENABLED": "false"}, sets=["store.ssd.bytes=3GiB"]).config
    assert (config.store.dram.bytes, config.store.ssd.enabled, config.store.ssd.bytes) == (
        "1GiB",
        False,
        "3GiB",
    )


def test_lists_are_written_with_commas_in_text_sources():
    config = load(environ={"WORKMEM__UPSTREAM__URLS": "http://a:1, http://b:2"}).config
    assert config.upstream.urls == ("http://a:1", "http://b:2")


def test_text_in_a_list_is_held_to_its_type():
    with pytest.raises(
        ConfigError, match=r"^\$\.upstream\.urls from environment WORKMEM__UPSTREAM__URLS: .*ftp://a"
    ):
        load(environ={"WORKMEM__UPSTREAM__URLS": "ftp://a"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "engine.dtype=fp8",
            r"\$\.engine\.dtype from --set engine\.dtype=fp8: must be one of bf16, fp32, got 'fp8'",
        ),
        ("engine.dtyp=fp32", r"\$\.engine\.dtyp from .*: unknown key 'dtyp'; did you mean dtype\?"),
        ("engines.dtype=fp32", r"\$\.engines\.dtype from .*: unknown key 'engines'; did you mean engine\?"),
        ("engine.batch_tokens=3", r"\$\.engine\.batch_tokens from .*>= 16, got '3'"),
        ("engine.batch_tokens=many", r"\$\.engine\.batch_tokens from .*Expected `int`, got 'many'"),
        ("engine.vram_bytes=3 parsecs", r"\$\.engine\.vram_bytes from .*'3 parsecs' is no size"),
        ("server.body_bytes_max=x", r"\$\.server\.body_bytes_max from .*'x' is no size"),
        ("engine=x", r"\$\.engine from .*'engine' is a section"),
        ("engine.dtype.x=1", r"\$\.engine\.dtype\.x from .*'dtype' is a value"),
        ("engine.dtype", r"--set engine\.dtype: write section\.key=value"),
        ("schema_version=2", r"\$\.schema_version from .*must be one of 1"),
    ],
)
def test_a_bad_setting_stops_the_start_with_path_and_source(text, message):
    with pytest.raises(ConfigError, match=f"^.*{message}"):
        load(environ={}, sets=[text])


def test_a_bad_value_stops_even_when_a_later_source_would_hide_it():
    write('[engine]\ndtype = "fp8"\n')
    with pytest.raises(ConfigError, match=r"^\$\.engine\.dtype from workmem\.toml"):
        load(environ={}, sets=["engine.dtype=fp32"])


def test_a_file_is_held_to_its_types():
    write('[engine]\nthreads = "2"\n')
    with pytest.raises(
        ConfigError, match=r"^\$\.engine\.threads from workmem\.toml: Expected `int`, got `str`"
    ):
        load(environ={})


def test_unknown_environment_keys_are_refused():
    with pytest.raises(
        ConfigError, match=r"^\$\.engine\.nope from environment WORKMEM__ENGINE__NOPE: unknown key"
    ):
        load(environ={"WORKMEM__ENGINE__NOPE": "1"})


def test_a_variable_with_one_underscore_too_few_is_named_and_not_read():
    loaded = load(environ={"WORKMEM_ENGINE_THREADS": "4", "WORKMEM_SERVICE_HOST": "10.0.0.1", "PATH": "x"})
    assert loaded.unread == {"WORKMEM_ENGINE_THREADS": "WORKMEM__ENGINE__THREADS"}
    assert loaded.config == Config()


def test_a_file_that_is_missing_or_broken_is_named():
    with pytest.raises(ConfigError, match=r"^absent\.toml cannot be read: No such file"):
        load(Path("absent.toml"), environ={})
    write("[engine\n")
    with pytest.raises(ConfigError, match=r"^workmem\.toml is not TOML"):
        load(environ={})
    Path("workmem.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"^workmem\.toml is not TOML"):
        load(environ={})


def test_a_scalar_where_a_section_belongs_is_refused():
    write('engine = "x"\n')
    with pytest.raises(ConfigError, match=r"^\$\.engine from workmem\.toml: 'engine' is a section"):
        load(environ={})


def test_cache_dir_follows_the_desktop_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "workmem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "workmem"


def test_config_loads_neither_torch_nor_the_web_framework():
    code = "import sys, workmem.config; sys.exit(sorted({'torch', 'transformers', 'starlette'} & set(sys.modules)) != [])"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
