"""Reads configuration values from a YAML file, the environment and the command line, and merges them.

The origin of each value is kept, so that errors can name it. Values are validated by pydantic, not here.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rlhf_ray.config.fields import has_short_form, section_tagged, sections_of, sections_of_values
from rlhf_ray.config.paths import expand_path
from rlhf_ray.errors import ConfigError

Path_ = tuple[str, ...]
PREFIX = "RLHF_RAY_"
"""Of environment variables."""
MOST_NODES = 100_000
"""Maximum keys and values of a configuration file; real ones have a few hundred."""


@dataclass(frozen=True)
class Layer:
    """Values from one source, nested like the sections, and the origin of each."""

    values: dict[str, Any]
    origins: dict[Path_, str] = field(default_factory=dict)
    """Path of keys -> origin, such as "ppo.yaml:12", "--run.steps" or "RLHF_RAY_RUN__STEPS"."""


def read_yaml(path: Path) -> Layer:
    """The values of a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML (with its line), is not a mapping, or names a key twice.
    """
    try:
        path = Path(expand_path(str(path)))
    except ValueError as e:
        raise ConfigError(f"the configuration file {e}") from None
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}; ready ones are in configs/") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the configuration file {path} cannot be read: {e}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_size(node)
        values = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(_yaml_problem(path, e)) from None
    except RecursionError:
        raise ConfigError(f"{path}: sections are nested too deeply, or contain themselves; flatten them") from None
    except (ValueError, TypeError) as e:  # a date with no such day, a number of thousands of digits
        raise ConfigError(f"{path}: a value cannot be read: {e}; put text in quotes") from None
    if values is None:
        return Layer({})
    if not isinstance(values, dict):
        raise ConfigError(f"{path} contains a {type(values).__name__}; a configuration is a mapping of sections "
                          "(run: ...)")
    if strange := [key for key in values if not isinstance(key, str)]:
        raise ConfigError(f"{path}: the key {strange[0]!r} is not text; use names of sections such as run")
    origins: dict[Path_, str] = {}
    for keys, line in _lines(node, ()):
        if keys in origins and keys[-1] != "<<":
            raise ConfigError(f"{path}:{line}: {'.'.join(keys)} is given twice (before at {origins[keys]}); keep one")
        origins[keys] = f"{path}:{line}"
    return Layer(values, origins)


def read_environment(cls: type[BaseModel]) -> Layer:
    """The values of RLHF_RAY_SECTION__KEY variables that belong to `cls`; text is converted as in `read_overrides`.

    Raises:
        ConfigError: a variable has another form.
    """
    return _layer(((keys, os.environ[name], name) for name, keys in environment_of(cls).items()), cls)


def environment_of(cls: type[BaseModel]) -> dict[str, Path_]:
    """The path of keys that each environment variable sets in `cls`, by the variable's name."""
    names = [name for name in sorted(os.environ, key=str.lower) if name.upper().startswith(PREFIX)]
    keys = {name: tuple(name[len(PREFIX):].lower().split("__")) for name in names}
    return {name: path for name, path in keys.items() if path[0] in cls.model_fields}


def read_overrides(overrides: list[str], cls: type[BaseModel] | None = None) -> Layer:
    """The values of `--section.key=value` or `--section.key value` arguments; the last value of a key counts.

    Values are text, converted by the field's type. `[a, b]` and `{k: v}` are read as YAML; `null` or nothing is empty.

    Args:
        cls: the stage's configuration, by which a name beside keys of the section it names is read as its `type`:
            `--algorithm.estimator=gae --algorithm.estimator.lam=0.9`.

    Raises:
        ConfigError: an argument has another form.
    """
    return _layer(((tuple(key.split(".")), text, f"--{key}") for key, text in _pairs(overrides)), cls)


def _layer(given: Iterable[tuple[Path_, str, str]], cls: type[BaseModel] | None) -> Layer:
    """The layer of some keys, each with its value as text and its origin."""
    values: dict[str, Any] = {}
    origins: dict[Path_, str] = {}
    for keys, text, origin in given:
        if not all(keys):
            raise ConfigError(f"{origin} is not a field; write --section.key=value or {PREFIX}SECTION__KEY=value")
        section = values
        for depth, part in enumerate(keys[:-1], start=1):
            inner = section.setdefault(part, {})
            if isinstance(inner, str) and has_short_form(_annotation(cls, keys[:depth])):
                inner = section[part] = _long_form(inner)
            if not isinstance(inner, dict):
                raise ConfigError(f"{origin} sets a key inside {part}, but {part} is also set to a value; keep one")
            section = inner
        value = _parsed(text, origin)
        before = section.get(keys[-1])
        if isinstance(value, str) and isinstance(before, dict) and has_short_form(_annotation(cls, keys)):
            value = _long_form(value)
            section[keys[-1]] = {**before, **value}
        else:
            section[keys[-1]] = value
        origins |= dict.fromkeys(_paths(value, keys), origin)
    return Layer(values, origins)


def _annotation(cls: type[BaseModel] | None, keys: Path_) -> Any:
    """The type of the field at a path; None if there is no such field."""
    annotation: Any = cls
    for key in keys:
        members = sections_of(annotation)
        info = members[0].model_fields.get(key) if members else None
        annotation = info.annotation if info else None
    return annotation


def _long_form(value: Any) -> Any:
    """A section that `type` chooses, as a mapping also if only its type is given."""
    return {"type": value} if isinstance(value, str) else value


def _paths(value: Any, path: Path_) -> Iterator[Path_]:
    """The path of a value, and those of all within it."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _paths(inner, (*path, str(key)))


def merge(cls: type[BaseModel], layers: list[Layer]) -> dict[str, Any]:
    """Merge layers into one nested dict; later layers take precedence, key by key.

    If a field may be one of two sections (`SFTConfig.model`: a path, or an architecture), a later layer with a key that
    only one of them has selects it, and earlier keys that only the other one has are dropped. If `type` chooses between
    sections (`algorithm.estimator`, `rewards.NAME`), keys of all types are kept: those without effect are reported.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge(cls, merged, layer.values)
    return merged


def _merge(cls: type[BaseModel] | None, low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        info = cls.model_fields.get(key) if cls else None
        members = sections_of(info.annotation) if info else ()
        if info and key in low and has_short_form(info.annotation):
            below, above = _long_form(low[key]), _long_form(value)
            merged[key] = {**below, **above} if isinstance(below, dict) and isinstance(above, dict) else value
        elif isinstance(value, dict) and isinstance(low.get(key), dict):
            below = _without_rivals(members, low[key], value)
            inner = sections_of_values(info.annotation) if info else ()
            if inner:
                merged[key] = {**below, **{n: _merge_value(inner, below.get(n), v) for n, v in value.items()}}
            else:
                merged[key] = _merge(members[0] if len(members) == 1 else None, below, value)
        else:
            merged[key] = value
    return merged


def _merge_value(members: tuple[type[BaseModel], ...], low: Any, high: Any) -> Any:
    if not isinstance(low, dict) or not isinstance(high, dict):
        return high
    if len(members) == 1:
        return _merge(members[0], low, high)
    return _merge(section_tagged(members, low | high), low, high)


def _without_rivals(members: tuple[type[BaseModel], ...], low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """`low` without the keys that no section selected by `high` has."""
    if len(members) < 2:
        return low
    chosen = [m for m in members if all(key in m.model_fields for key in high)]
    known = {key for m in chosen for key in m.model_fields}
    rivals = {key for m in members for key in m.model_fields} - known if chosen else set()
    return {key: value for key, value in low.items() if key not in rivals}


def _pairs(overrides: list[str]) -> Iterator[tuple[str, str]]:
    """Key and text of each override."""
    rest = list(overrides)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or len(argument) == 2:
            raise ConfigError(f"unexpected argument {argument!r}; overrides look like --section.key=value")
        key, equals, text = argument[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{argument} has no value; write {argument}=value")
            text = rest.pop(0)
        yield key, text


def _parsed(value: str, origin: str) -> Any:
    """A value given as text: lists, mappings and "quoted text" are read as YAML, `null` and nothing as empty; other
    text is unchanged."""
    if value.strip() in ("", "null"):
        return None
    if value.lstrip()[0] not in '[{"':
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError):
        raise ConfigError(f"{origin}: {value!r} begins like a list, a mapping or quoted text, but is not valid YAML; "
                          "check its brackets or quotes") from None


def _lines(node: yaml.Node | None, prefix: Path_) -> Iterator[tuple[Path_, int]]:
    """Every key path of a YAML document with its line, counted from 1."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*prefix, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _lines(value, path)


def _check_size(node: yaml.Node | None) -> None:
    """Refuse a document that is too large after its aliases are expanded.

    Raises:
        YAMLError: it has more than `MOST_NODES` values.
        RecursionError: it contains itself.
    """
    left = MOST_NODES

    def visit(node: yaml.Node | None) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise yaml.YAMLError(f"its aliases (*name) expand to more than {MOST_NODES} values")
        if isinstance(node, yaml.CollectionNode):
            for child in node.value:
                for part in child if isinstance(child, tuple) else (child,):
                    visit(part)

    visit(node)


def _yaml_problem(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    where = f"{path}:{mark.line + 1}, column {mark.column + 1}" if mark else str(path)
    return f"{where}: not valid YAML: {problem}"
