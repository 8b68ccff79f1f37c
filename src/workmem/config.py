"""One frozen tree of settings, and the only place that reads the environment.

Sources, later wins: defaults, a TOML file, `WORKMEM__SECTION__KEY` in the environment, `--set
section.key=value`. A key nobody knows or a value out of range stops the start, with the setting's path
and the source it came from: nothing is guessed and nothing is silently ignored.

Each section is declared beside what it configures; this module composes them.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from workmem.cluster.config import ClusterConfig
from workmem.core.errors import ConfigError
from workmem.core.units import parse_bytes
from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.vllm.config import VllmConfig
from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.prompt.config import PromptConfig
from workmem.store.config import StoreConfig

ENVIRONMENT_PREFIX = "WORKMEM__"
DEFAULT_FILE = "workmem.toml"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a person sets. Derived values are computed where they are used."""

    schema_version: Literal[1] = 1
    """Version of this tree; a file of another version is refused."""
    server: ServerConfig = ServerConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    prompt: PromptConfig = PromptConfig()
    engine: EmbeddedConfig = EmbeddedConfig()
    store: StoreConfig = StoreConfig()
    vllm: VllmConfig = VllmConfig()
    cluster: ClusterConfig = ClusterConfig()


class LoadedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration and, for every dotted path that was set, the source that set it."""

    config: Config
    origins: dict[str, str]
    unread: dict[str, str]
    """Variables of the environment that look like settings and are none (`WORKMEM_SERVER_PORT`), and how to write
    them. Noted, not refused: an orchestrator may have set them for a service of that name."""

    def origin(self, path: str) -> str:
        """Source of the setting at dotted `path`, "default" where nobody set it."""
        return self.origins.get(path, "default")


class _Setting(msgspec.Struct, frozen=True):
    path: tuple[str, ...]
    value: object
    source: str
    is_text: bool
    """The environment and `--set` carry text only; a TOML file has types and is held to them."""

    def fail(self, problem: str) -> ConfigError:
        return ConfigError(f"$.{'.'.join(self.path)} from {self.source}: {problem}")


def load(
    file: Path | None = None, *, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read all sources and return the tree.

    `file` must exist when given; without it `workmem.toml` of the working directory is read if there
    is one. `environ` defaults to the process's. Raises ConfigError at the first bad setting.
    """
    environ = os.environ if environ is None else environ
    settings = [
        *_from_file(file),
        *_from_environment(environ),
        *(_from_argument(text) for text in sets),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in settings:
        _place(values, setting)
        origins[".".join(setting.path)] = setting.source
    config = cast("Config", _build(Config, values, (), origins))
    meant = {f"WORKMEM_{'_'.join(path)}".upper(): _variable(path) for path in _paths(Config, ())}
    unread = {name: meant[name] for name in sorted(environ) if name in meant}
    return LoadedConfig(config=config, origins=origins, unread=unread)


def cache_dir() -> Path:
    """Folder for what can be made again (`$XDG_CACHE_HOME/workmem`, by default `~/.cache/workmem`)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "workmem"


def host_socket(setting: str) -> Path:
    """Where the host's store listens: `setting` unless empty, else in the user's runtime or cache folder."""
    if setting:
        return Path(setting).expanduser()
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return (Path(base) / "workmem" if base else cache_dir() / "run") / "store.sock"


def _from_file(file: Path | None) -> list[_Setting]:
    path = file or Path(DEFAULT_FILE)
    if file is None and not path.is_file():
        return []
    try:
        with path.open("rb") as stream:
            document = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return list(_flatten(document, (), str(path)))


def _flatten(table: dict[str, Any], above: tuple[str, ...], source: str) -> list[_Setting]:
    settings: list[_Setting] = []
    for key, value in table.items():
        path = (*above, key)
        if isinstance(value, dict) and _section(path):
            settings += _flatten(cast("dict[str, Any]", value), path, source)
        else:
            settings.append(_Setting(path, value, source, is_text=False))
    return settings


def _from_environment(environ: Mapping[str, str]) -> list[_Setting]:
    return [
        _Setting(
            tuple(name[len(ENVIRONMENT_PREFIX) :].lower().split("__")),
            value,
            f"environment {name}",
            is_text=True,
        )
        for name, value in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIX)
    ]


def _from_argument(text: str) -> _Setting:
    path, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write section.key=value, as in engine.dtype=fp32")
    return _Setting(tuple(path.strip().split(".")), value.strip(), f"--set {text}", is_text=True)


def _place(values: dict[str, Any], setting: _Setting) -> None:
    """Check one setting against its declared type and put it into the tree of plain values."""
    field = _field(setting)
    *sections, key = setting.path
    for section in sections:
        values = values.setdefault(section, {})
    values[key] = _convert(setting, field)


def _field(setting: _Setting) -> msgspec.structs.FieldInfo:
    struct: type[msgspec.Struct] = Config
    for depth, key in enumerate(setting.path):
        fields = {field.name: field for field in msgspec.structs.fields(struct)}
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            guess = f"did you mean {near[0]}? " if near else ""
            raise setting.fail(f"unknown key {key!r}; {guess}known here: {', '.join(fields)}")
        field = fields[key]
        last = depth == len(setting.path) - 1
        if not is_section(field.type):
            if not last:
                raise setting.fail(f"{key!r} is a value and holds no keys")
            return field
        if last:
            raise setting.fail(
                f"{key!r} is a section; set one of its keys: {', '.join(_field_names(field.type))}"
            )
        struct = field.type
    raise setting.fail("names no setting")


def _convert(setting: _Setting, field: msgspec.structs.FieldInfo) -> object:
    value = setting.value
    if setting.is_text and isinstance(msgspec.inspect.type_info(field.type), msgspec.inspect.CollectionType):
        value = [part.strip() for part in cast("str", value).split(",") if part.strip()]
    try:
        converted = msgspec.convert(value, field.type, strict=not setting.is_text)
    except msgspec.ValidationError as error:
        raise setting.fail(_explain(str(error), field.type, setting)) from error
    if _is_size(field.name):
        parse_bytes(cast("str | int", converted), f"$.{'.'.join(setting.path)} from {setting.source}")
    return converted


def _explain(problem: str, wanted: object, setting: _Setting) -> str:
    info, value = msgspec.inspect.type_info(wanted), setting.value
    if isinstance(info, msgspec.inspect.LiteralType):
        return f"must be one of {', '.join(map(str, info.values))}, got {value!r}"
    # A text source has nothing but text: that it "got str" says nothing.
    problem = problem.split(", got", maxsplit=1)[0] if setting.is_text else problem
    return problem if "got" in problem else f"{problem}, got {value!r}"


def _build(
    struct: type[msgspec.Struct], values: dict[str, Any], path: tuple[str, ...], origins: dict[str, str]
) -> msgspec.Struct:
    arguments = {
        field.name: _build(field.type, values.get(field.name, {}), (*path, field.name), origins)
        if is_section(field.type)
        else values[field.name]
        for field in msgspec.structs.fields(struct)
        if is_section(field.type) or field.name in values
    }
    try:
        return struct(**arguments)
    except (ValueError, TypeError, ConfigError) as error:
        # A section refuses a combination of values: name all that took part.
        prefix = "".join(f"{key}." for key in path)
        sources = [f"{name} from {source}" for name, source in origins.items() if name.startswith(prefix)]
        text = str(error)
        where = "" if text.startswith("$") else f"{'.'.join(('$', *path))}: "
        raise ConfigError(f"{where}{text} (set: {'; '.join(sources) or 'defaults only'})") from error


def is_section(kind: object) -> bool:
    """Tell whether a field of type `kind` holds keys rather than a value."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _paths(struct: type[msgspec.Struct], above: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Path of every setting."""
    paths: list[tuple[str, ...]] = []
    for field in msgspec.structs.fields(struct):
        path = (*above, field.name)
        paths += _paths(field.type, path) if is_section(field.type) else [path]
    return paths


def _variable(path: tuple[str, ...]) -> str:
    return ENVIRONMENT_PREFIX + "__".join(path).upper()


def _is_size(name: str) -> bool:
    """Tell whether the setting `name` is a size with units."""
    return "bytes" in name.split("_")


def _field_names(struct: type[msgspec.Struct]) -> list[str]:
    """Names of the keys of a section, in the order they are declared."""
    return [field.name for field in msgspec.structs.fields(struct)]


def _section(path: tuple[str, ...]) -> bool:
    struct: object = Config
    for key in path:
        kinds = {
            field.name: field.type for field in msgspec.structs.fields(cast("type[msgspec.Struct]", struct))
        }
        struct = kinds.get(key)
        if not is_section(struct):
            return False
    return True
