"""Unions of sections on `type`. One with a default has a short form: `estimator: grpo` is `estimator: {type: grpo}`.

A key that only other types of the union have does not act. It is left out with a warning and not refused, so that a
sweep over types can set keys of all of them.
"""

from typing import Any, Self

from pydantic import PrivateAttr, ValidatorFunctionWrapHandler, WrapValidator

from rlhf_ray.config.fields import section_tagged, type_tag
from rlhf_ray.config.section import Section


class TypedSection(Section):
    """One of the sections that `type` chooses from."""

    _left_out: dict[str, tuple[Any, tuple[str, ...]]] = PrivateAttr(default_factory=dict)

    @property
    def left_out(self) -> dict[str, tuple[Any, tuple[str, ...]]]:
        """Keys that were given and belong to other types only: their values, and these types."""
        return self._left_out

    def __eq__(self, other: object) -> bool:
        """What was left out makes no difference."""
        return type(self) is type(other) and dict(self) == dict(other)  # type: ignore[call-overload]

    def _without(self, keys: dict[str, tuple[Any, tuple[str, ...]]]) -> Self:
        self._left_out.update(keys)
        return self


def one_of(members: tuple[type[TypedSection], ...], default: str | None) -> WrapValidator:
    """Reads the short form, and leaves out keys of other types.

    Args:
        members: all sections of the union; a field may accept fewer.
        default: the type of a section without `type`; None if there is none, and no short form.
    """

    def chosen(given: Any, section_of: ValidatorFunctionWrapHandler) -> Any:
        values = {"type": given} if isinstance(given, str) and default is not None else given
        if not isinstance(values, dict):
            return section_of(values)
        if default is not None:
            values = {"type": default, **values}
        own = section_tagged(members, values)
        foreign: dict[str, tuple[Any, tuple[str, ...]]] = {}
        for key in values if own else ():
            owners = _types_with(members, key)
            if owners and values["type"] not in owners:
                foreign[key] = (values[key], owners)
        section = section_of({key: value for key, value in values.items() if key not in foreign})
        return section._without(foreign) if foreign else section

    return WrapValidator(chosen)


def tag_of(given: Any, default: str) -> str | None:
    """The type of a section of a union in any form: its name, a mapping, or a section; None for anything else."""
    if isinstance(given, TypedSection):
        return type_tag(type(given))
    tag = given.get("type", default) if isinstance(given, dict) else given
    return tag if isinstance(tag, str) else None


def _types_with(members: tuple[type[TypedSection], ...], key: Any) -> tuple[str, ...]:
    return tuple(tag for member in members if key in member.model_fields and (tag := type_tag(member)))
