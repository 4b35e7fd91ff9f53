"""Base class of every section of the configuration: typed, frozen, and strict about unknown keys."""

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rlhf_ray.errors import ConfigError


class Section(BaseModel):
    """A part of the configuration. Each field has a type, a default, bounds and one sentence."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    def __init__(self, **values: Any) -> None:
        """A section of these values.

        Raises:
            ConfigError: lists all problems, each with its field, value and fix.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            from rlhf_ray.config.error_messages import explain

            raise ConfigError(explain(type(self), error, [])) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
    """pydantic makes inner sections without it, and so reports the problems of all together."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refused.

        Raises:
            ConfigError: says how to change a configuration.
        """
        raise ConfigError(f"{type(self).__name__}.{name} cannot be set to {str(value)[:60]!r}: a configuration does "
                          "not change; make another one")

    @model_validator(mode="before")
    @classmethod
    def _with_own_defaults(cls, given: Any) -> Any:
        """A section of a base class, such as a `CoordinatorConfig` for GRPO's, gives the values that are set in it."""
        if isinstance(given, Section) and type(given) is not cls and issubclass(cls, type(given)):
            return {name: getattr(given, name) for name in given.model_fields_set}
        return given

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, given: Any) -> Any:
        """YAML reads yes, no, on and off as true and false, which pydantic would take for 1 and 0. For a field that may
        be `off`, false is that."""
        if isinstance(given, dict):
            given = {name: "off" if value is False and name in cls.model_fields
                     and _takes(cls.model_fields[name].annotation, "off") else value for name, value in given.items()}
        for name, value in given.items() if isinstance(given, dict) else ():
            values = value if isinstance(value, list | tuple) else [value]
            wrong = next((each for each in values if isinstance(each, bool)), None)
            if wrong is not None and name in cls.model_fields and not _takes_bool(cls.model_fields[name].annotation):
                raise ValueError(f"{name}={value} has a truth value, as which YAML reads yes, no, on and off too; "
                                 "write a text in quotes, a number in digits, and null for nothing")
        return given


def as_set(section: Any) -> dict[str, Any] | None:
    """The values that are set in a section, or in a mapping; None for anything else."""
    if isinstance(section, Section):
        return {name: getattr(section, name) for name in section.model_fields_set}
    return dict(section) if isinstance(section, Mapping) else None


S = TypeVar("S", bound=BaseModel)


def settled(section: S, **values: Any) -> S:
    """The section with other values of some fields, which do not count as set. They are not validated."""
    return section.model_construct(set(section.model_fields_set), **{**dict(section), **values})


def _takes_bool(annotation: Any) -> bool:
    """Whether a field may be true or false, or is a section, which says so itself."""
    section = isinstance(annotation, type) and issubclass(annotation, Section)
    return section or annotation in (bool, Any) or any(map(_takes_bool, get_args(annotation)))


def _takes(annotation: Any, text: str) -> bool:
    """Whether one of the texts that a field may have is `text`."""
    return annotation == text or any(_takes(each, text) for each in get_args(annotation))
