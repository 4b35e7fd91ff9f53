"""Describes the fields of a configuration: names, types, defaults, bounds and sentences, read from the pydantic models.

`--help`, `docs/configuration.md` and error messages use it. Values are only listed, with the names of their fields.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

_UNSET = object()
_PLAIN: dict[Any, str] = {
    JsonValue: "any value", int: "int", float: "float", str: "text", bool: "true or false"}
_BOUNDS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


@dataclass(frozen=True)
class FieldDescription:
    """One field that can be set."""

    path: str
    """Dotted name from the top, as in `--path=value`; NAME is a key that the user chooses."""
    type: str
    default: str
    """Default in YAML notation; "" if the field is required."""
    required: bool
    bounds: str
    """Limits such as ">= 1, < 10"; "" if there are none."""
    sentence: str

    @property
    def section(self) -> str:
        """First part of the path."""
        return self.path.split(".")[0]


def describe_fields(cls: type[BaseModel]) -> list[FieldDescription]:
    """Every field of a stage's configuration that can be set, depth first, in the order of the models.

    For a field that may be one of two sections (`SFTConfig.model`), the fields of both are listed, shared ones once. If
    `type` chooses between sections (`PPOConfig.rewards`), the sentence of a field that differs names its types.
    """
    described: dict[str, FieldDescription] = {}
    for item in _walk(cls, _UNSET, ()):
        described.setdefault(item.path, item)
    return list(described.values())


def changed_fields(section: BaseModel, default: Any = None, prefix: str = "") -> Iterator[tuple[str, BaseModel, Any]]:
    """(dotted path, section that holds it, value) of each field whose value is not its default; of a section that is
    off by default, the section itself too. Fields without a default are not included.

    Args:
        default: the section's value if nothing is set.
        prefix: of the paths.
    """
    for name, field in type(section).model_fields.items():
        value, path = getattr(section, name), f"{prefix}{name}"
        usual = getattr(default, name) if isinstance(default, type(section)) else _default(field)
        if isinstance(value, BaseModel):
            if usual is None:
                yield path, section, value
            yield from changed_fields(value, usual, f"{path}.")
        elif isinstance(value, dict) and all(isinstance(item, BaseModel) for item in value.values()):
            for key, item in value.items():
                usual_item = usual.get(key) if isinstance(usual, dict) else None
                yield from changed_fields(item, usual_item, f"{path}.{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for number, item in enumerate(value):
                yield from changed_fields(item, None, f"{path}.{number}.")
        elif usual is not _UNSET and value != usual:
            yield path, section, value


def strings_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """All strings of a configuration with the dotted names of their fields."""
    if isinstance(value, BaseModel):
        for key in type(value).model_fields:
            yield from strings_of(getattr(value, key), f"{name}.{key}".lstrip("."))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_of(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_of(item, name)
    elif isinstance(value, str):
        yield name, value


def sections_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The sections that an annotation allows: one for `X` and `X | None`, several for a union, none for a scalar."""
    if get_origin(annotation) is Annotated:
        return sections_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(s for member in get_args(annotation) for s in sections_of(member))
    return (annotation,) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else ()


def sections_of_values(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The sections that the values of a `dict[str, Section]` may be; none for other annotations."""
    return sections_of(get_args(annotation)[1]) if get_origin(annotation) is dict else ()


def type_tag(section: type[BaseModel]) -> str | None:
    """The value of `type` that selects a section from a union; None for a section without such a field."""
    field = section.model_fields.get("type")
    return get_args(field.annotation)[0] if field and get_origin(field.annotation) is Literal else None


def section_tagged(members: tuple[type[BaseModel], ...], value: Any) -> type[BaseModel] | None:
    """The member of a union that the key `type` of a mapping selects; None if it selects none."""
    tag = value.get("type") if isinstance(value, dict) else None
    return next((m for m in members if tag is not None and type_tag(m) == tag), None)


def has_short_form(annotation: Any) -> bool:
    """Whether `type` chooses between sections and has a default, so that its value alone can stand for the section."""
    members = sections_of(annotation)
    return bool(members) and all(type_tag(m) and not m.model_fields["type"].is_required() for m in members)


def section_of_items(annotation: Any) -> type[BaseModel] | None:
    """The section that every item of a `list[Section]` is; None for other annotations."""
    members = sections_of(get_args(annotation)[0]) if get_origin(annotation) is list else ()
    return members[0] if members else None


def type_name(annotation: Any) -> str:
    """A field's type in words, for users of YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is NoneType:
        return "empty"
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(str(a) for a in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_name(a) for a in arguments)
    if origin is tuple:
        return "[" + ", ".join(type_name(a) for a in arguments) + "]"
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "{" + ": ".join(type_name(a) for a in arguments) + "}"
    if members := sections_of(annotation):
        return "{" + ", ".join(members[0].model_fields) + "}"
    return _PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation)))


def bounds_of(field: FieldInfo) -> str:
    """The limits of a number, e.g. ">= 0, < 1"."""
    parts = []
    for constraint in field.metadata:
        for kind, attribute, sign in _BOUNDS:
            if isinstance(constraint, kind):
                parts.append(f"{sign} {getattr(constraint, attribute)}")
    return ", ".join(parts)


def format_value(value: Any) -> str:
    """A value on one line in YAML notation."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(format_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {format_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str) and value != value.strip():
        return json.dumps(value, ensure_ascii=False)  # quoted as in YAML, because the white space matters
    return str(value)


def _walk(cls: type[BaseModel], instance: Any, prefix: tuple[str, ...]) -> Iterator[FieldDescription]:
    """Fields of a section; `instance` has the defaults at the section's position, if there are any."""
    for name, field in cls.model_fields.items():
        path = (*prefix, name)
        default = getattr(instance, name) if isinstance(instance, cls) else _default(field)
        members, values = sections_of(field.annotation), sections_of_values(field.annotation)
        if len(values) > 1:
            tags = " | ".join(str(type_tag(member)) for member in values)
            yield FieldDescription(".".join((*path, "NAME", "type")), tags, "", True, "", "Source of this reward.")
            yield from _walk_types(values, _UNSET, (*path, "NAME"))
        elif has_short_form(field.annotation):
            tags = " | ".join(str(type_tag(member)) for member in members)
            yield replace(_describe(path, field, default.type), type=tags)
            yield from _walk_types(members, default, path)
        elif values:
            first = next(iter(default.values()), _UNSET) if isinstance(default, dict) else _UNSET
            yield from _walk(values[0], first, (*path, "NAME"))
        elif members:
            for member in members:
                inside = _walk(member, default, path)
                yield from (_if_used(f) for f in inside) if default is None else inside
        else:
            yield _describe(path, field, default)


def _walk_types(
    members: tuple[type[BaseModel], ...], default: Any, prefix: tuple[str, ...]
) -> Iterator[FieldDescription]:
    """Fields of sections that `type` selects, but for `type`: each once, with the types that have it unless all do.

    Fields of the same name that differ between types are listed as one field with the sentence of each type.
    """
    tags = [str(type_tag(m)) for m in members]
    by_path: dict[str, dict[FieldDescription, list[str]]] = {}
    for member, tag in zip(members, tags, strict=True):
        for item in _walk(member, default, prefix):
            if not item.path.endswith(".type"):
                by_path.setdefault(item.path, {}).setdefault(item, []).append(tag)
    for variants in by_path.values():
        first = next(iter(variants))
        if len(variants) == 1 and len(variants[first]) == len(members):
            yield first
            continue
        sentences = " ".join(f"{', '.join(of)}: {v.sentence}" for v, of in variants.items())
        alike = all((v.type, v.default, v.required) == (first.type, first.default, first.required) for v in variants)
        default = first.default if alike else "by type"
        yield replace(first, sentence=sentences, required=first.required and alike, default=default)


def _if_used(item: FieldDescription) -> FieldDescription:
    """A field of an optional section: a field that the section requires is only required if the section is used."""
    return replace(item, required=False, default="required if used") if item.required else item


def _default(field: FieldInfo) -> Any:
    return _UNSET if field.is_required() else field.get_default(call_default_factory=True, validated_data={})


def default_of(config: BaseModel, path: str) -> Any:
    """The default of the field at a dotted path; of a section within a mapping, of that section."""
    *above, last = path.split(".")
    section: Any = config
    for name in above:
        section = section[name] if isinstance(section, dict) else getattr(section, name)
    return _default(type(section).model_fields[last])


def _describe(path: tuple[str, ...], field: FieldInfo, default: Any) -> FieldDescription:
    required = default is _UNSET
    return FieldDescription(
        path=".".join(path),
        type=type_name(field.annotation),
        default="" if required else format_value(default),
        required=required,
        bounds=bounds_of(field),
        sentence=" ".join((field.description or "").split()),
    )
