"""Base class of every section of the configuration: typed, frozen, and strict about unknown keys."""

from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A part of the configuration. Each field has a type, a default, bounds and one sentence."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, given: Any) -> Any:
        """YAML reads yes, no, on and off as true and false, which pydantic would take for 1 and 0."""
        for name, value in given.items() if isinstance(given, dict) else ():
            values = value if isinstance(value, list | tuple) else [value]
            wrong = next((each for each in values if isinstance(each, bool)), None)
            if wrong is not None and name in cls.model_fields and not _takes_bool(cls.model_fields[name].annotation):
                raise ValueError(f"{name}={value} has a truth value, as which YAML reads yes, no, on and off too; "
                                 "write a text in quotes, a number in digits, and null for nothing")
        return given


S = TypeVar("S", bound=BaseModel)


def settled(section: S, **values: Any) -> S:
    """The section with other values of some fields, which do not count as set. They are not validated."""
    return section.model_construct(set(section.model_fields_set), **{**dict(section), **values})


def _takes_bool(annotation: Any) -> bool:
    """Whether a field may be true or false, or is a section, which says so itself."""
    section = isinstance(annotation, type) and issubclass(annotation, Section)
    return section or annotation in (bool, Any) or any(map(_takes_bool, get_args(annotation)))
