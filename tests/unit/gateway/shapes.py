"""What stock clients' types say of a body: it is of the type, and has no field that the type does not know."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def checked(kind: type[BaseModel], body: Any) -> Any:
    """`body` as `kind`, without conversions of types."""
    return kind.model_validate(body, strict=True)


def unknown_fields(value: Any, path: str = "") -> list[str]:
    """Fields of the types in a value that their classes do not declare."""
    if isinstance(value, list):
        return [name for each in value for name in unknown_fields(each, path)]
    if not isinstance(value, BaseModel):
        return []
    own = [f"{path}{name}" for name in value.model_extra or {}]
    inner = [name for field in type(value).model_fields
             for name in unknown_fields(getattr(value, field), f"{path}{field}.")]
    return own + inner
