"""Values that the program fills in, as opposed to those that somebody set.

Both are ordinary values of the configuration. One that is filled in is not among its section's `model_fields_set`, or
is named in `cluster.derived`, where a saved configuration keeps what was derived from the machines.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from rlhf_ray.config.fields import default_of
from rlhf_ray.config.stages import StageConfig

C = TypeVar("C", bound=StageConfig)


def is_derived(config: StageConfig, path: str) -> bool:
    """Whether the field at a dotted path, or a section that holds it, was derived from the machines of the run."""
    return any(path == name or path.startswith(f"{name}.") for name in config.cluster.derived)


def is_set(config: StageConfig, path: str) -> bool:
    """Whether somebody set the field at a dotted path, or a field within it."""
    if is_derived(config, path):
        return False
    value: Any = config
    for name in path.split("."):
        present = value.model_fields_set if isinstance(value, BaseModel) else value
        if name not in present:
            return False
        value = _inside(value, name)
    return True


def value_at(config: StageConfig, path: str) -> Any:
    """The value of the field at a dotted path.

    Raises:
        LookupError: there is no such field.
    """
    value: Any = config
    for name in path.split("."):
        if isinstance(value, BaseModel) and name not in type(value).model_fields:
            raise LookupError(path)
        value = _inside(value, name)
    return value


def with_settled(config: C, values: Mapping[str, Any]) -> C:
    """The configuration with other values at dotted paths, which are set if those before were. They are not
    validated."""
    for path, value in values.items():
        config = _replaced(config, path.split("."), value, forget=False)
    return config


def with_derived(config: C, values: Mapping[str, Any]) -> C:
    """The configuration with these values of the fields that nobody set, which `cluster.derived` names."""
    taken = {path: value for path, value in values.items() if not is_set(config, path)}
    return _derived(config, taken, {*config.cluster.derived, *taken})


def without_derived(config: C, paths: Iterable[str]) -> C:
    """The configuration with the defaults of those of these fields that nobody set, which are no longer derived."""
    defaults = {path: default_of(config, path) for path in paths if not is_set(config, path)}
    return _derived(config, defaults, set(config.cluster.derived) - set(defaults))


def _derived(config: C, values: Mapping[str, Any], names: Iterable[str]) -> C:
    for path, value in values.items():
        config = _replaced(config, path.split("."), value, forget=True)
    return _replaced(config, ["cluster", "derived"], sorted(names), forget=False)  # type: ignore[no-any-return]


def _inside(value: Any, name: str) -> Any:
    if isinstance(value, BaseModel):
        return getattr(value, name)
    if isinstance(value, dict):
        return value[name]
    raise LookupError(name)


def _replaced(value: Any, path: list[str], new: Any, forget: bool) -> Any:
    """`value` with `new` at a path. With `forget`, the field no longer counts as set."""
    if not path:
        return new
    name, *rest = path
    changed = _replaced(_inside(value, name), rest, new, forget)
    if isinstance(value, dict):
        return {**value, name: changed}
    kept = value.model_fields_set - ({name} if forget and not rest else set())
    return value.model_construct(kept, **{**dict(value), name: changed})
