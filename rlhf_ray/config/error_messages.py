"""Turns pydantic's errors into one message with each field, its value, its origin and the fix."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Union

from pydantic import BaseModel, ValidationError

from rlhf_ray.config.config_layers import Layer
from rlhf_ray.config.fields import (
    describe_fields,
    has_short_form,
    section_of_items,
    sections_of,
    sections_of_values,
    type_tag,
)
from rlhf_ray.config.names_elsewhere import meaning_elsewhere, nest

_SCALARS = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text; put it in quotes",
    "tuple_type": "must be a list, such as [0.9, 0.95]",
    "list_type": "must be a list",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
SHOWN_KEYS = 3
"""Keys of another system's section that are named together."""
_TYPE_ERRORS = ("union_tag_invalid", "union_tag_not_found")
_SECTION_TYPES = ("model_type", "model_attributes_type", "dict_type")


@dataclass(frozen=True)
class _Place:
    """Position of an error in the configuration."""

    path: tuple[str, ...]
    parent: type[BaseModel] | None
    """Section that contains the last key; None inside a mapping or list."""
    annotation: Any
    """Type of the field at `path`; None for an unknown key."""
    branch: type[BaseModel] | None
    """Section of a union that the error is about."""
    union: tuple[str, ...]
    """Path of that union."""


def explain(cls: type[BaseModel], error: ValidationError, layers: list[Layer]) -> str:
    """One line per problem; `layers` are the sources of the values (later layers take precedence)."""
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        place = _place(cls, problem["loc"])
        unknown = problem["type"] == "extra_forbidden"
        for line in _unknown(cls, place, problem["input"], layers) if unknown else [_line(place, problem, layers)]:
            if line not in lines:
                lines.append(line)
    return "the configuration cannot run:\n" + "\n".join(f"  {line}" for line in lines)


def explain_option(cls: type[BaseModel], argument: str) -> str:
    """What is wrong with an --option without a value, whose section the stage does not have."""
    name = argument.removeprefix("--")
    section = name.split(".")[0]
    meant = meaning_elsewhere(name, "true", _known(_paths_of(cls)), accepts=partial(_accepts, cls))
    return f"{argument}: there is no section {section}; {meant or suggestion(section, list(cls.model_fields))}"


def suggestion(word: str, known: list[str]) -> str:
    """'did you mean x?', or the list of known words."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"use one of: {', '.join(known)}"


def _place(cls: type[BaseModel], loc: tuple[Any, ...]) -> _Place:
    """Resolve pydantic's location, which names the member of a union after the field."""
    annotation: Any = cls
    parent: type[BaseModel] | None = None
    branch: type[BaseModel] | None = None
    path: tuple[str, ...] = ()
    union: tuple[str, ...] = ()
    for part in loc:
        members, values = sections_of(annotation), sections_of_values(annotation)
        if item := section_of_items(annotation):
            values = (item,)
        if len(members) > 1 and (tagged := _tagged(members, str(part))):
            annotation, branch, union = tagged, tagged, path
            continue
        path = (*path, str(part))
        parent = members[0] if members else None
        if parent:
            info = parent.model_fields.get(str(part))
            annotation = info.annotation if info else None
        else:
            annotation = Union[values] if values else None  # noqa: UP007 - of sections known at run time only
    return _Place(path, parent, annotation, branch, union)


def _tagged(members: tuple[type[BaseModel], ...], tag: str) -> type[BaseModel] | None:
    """The member that a union tag refers to: its `type`, or its name."""
    return next((m for m in members if tag in (type_tag(m), m.__name__)), None)


def _line(place: _Place, problem: Any, layers: list[Layer]) -> str:
    kind, name = problem["type"], ".".join(place.path)
    if kind == "value_error":  # our own validators already give complete messages
        text = problem["msg"].removeprefix("Value error, ")
        return f"{name}: {text}{_origin_within(place.path, text, layers)}"
    if kind == "missing":
        return f"{name}: is required{_sentence(place)}; set it in the file or with --{name}{_first_key(place)}=..."
    if kind in _TYPE_ERRORS:
        types = ", ".join(tag for member in sections_of(place.annotation) if (tag := type_tag(member)))
        given = problem["input"].get("type") if isinstance(problem["input"], dict) else None
        what = f"is required (one of {types})" if given is None else f"must be one of {types}"
        shown = "" if given is None else f"={given!r}"
        return f"{name}.type{shown}: {what}{origin((*place.path, 'type'), layers)}"
    return f"{name}={_shortened(problem['input'])}: {_rule(place, problem)}{origin(place.path, layers)}"


def _unknown(cls: type[BaseModel], place: _Place, given: Any, layers: list[Layer]) -> list[str]:
    """A line for an unknown key, or for each that another system has in a section of this name."""
    fields = _paths_of(cls)
    known = _known(fields)
    python = not layers
    accepts = partial(_accepts, cls)
    meanings = {path: meaning_elsewhere(".".join(path), value, known, python=python, accepts=accepts)
                for path, value in _leaves(given, place.path)}
    found = [(path, meant) for path, meant in meanings.items() if meant]
    others = [path for path, meant in meanings.items() if not meant]
    if not found:
        of_name = meaning_elsewhere(place.path[-1], given, known, place.path[0], python, accepts)
        meant = _same_name(place, fields) or of_name or _similar_name(place, fields)
        found, others = [(place.path, meant or suggestion(place.path[-1], _siblings(place)))], []
    lines = [f"{'.'.join(path)}: unknown key; {meant}{origin(path, layers)}" for path, meant in found]
    if others:
        named = ", ".join(".".join(path) for path in others[:SHOWN_KEYS])
        more = f" and {len(others) - SHOWN_KEYS} more" if len(others) > SHOWN_KEYS else ""
        lines.append(f"{named}{more}: nothing here is called so; leave it out{origin(others[0], layers)}")
    return lines


def _accepts(cls: type[BaseModel], values: Mapping[str, Any]) -> bool:
    """Whether the fields at these paths take the values, apart from others that are required."""
    try:
        cls.model_validate(nest(values))
    except ValidationError as error:
        return all(problem["type"] in ("missing", "union_tag_not_found") for problem in error.errors())
    return True


def _paths_of(cls: type[BaseModel]) -> list[str]:
    return [field.path for field in describe_fields(cls)]


def _known(paths: Sequence[str]) -> set[str]:
    """Fields by their paths, and the sections that hold them."""
    return set(paths) | {path[:at] for path in paths for at, letter in enumerate(path) if letter == "."}


def _leaves(given: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values within a section by their paths; of anything else, it alone."""
    if not isinstance(given, dict) or not given:
        yield path, given
        return
    for key, value in given.items():
        yield from _leaves(value, (*path, str(key)))


def _siblings(place: _Place) -> list[str]:
    return list(place.parent.model_fields) if place.parent else []


def _same_name(place: _Place, paths: Sequence[str]) -> str | None:
    """Suggestion for an unknown key of a section: a field of this name below; None without one."""
    key = place.path[-1]
    if place.branch and "." not in key and ".".join(place.path) in paths:  # of the other section of a union
        return f"it does not go with the other keys of {place.path[-2]}; remove it"
    section = "".join(f"{name}." for name in place.path[:-1])
    if nested := [path for path in paths if section and path.startswith(section) and path.endswith(f".{key}")]:
        return f"did you mean {' or '.join(nested[:3])}?"
    if nested := [path for path in paths if path.startswith(section) and key in _tails(path)]:  # kl_coef: kl.coef
        return f"did you mean {' or '.join(nested[:3])}?"
    return None


def _similar_name(place: _Place, paths: Sequence[str]) -> str | None:
    """Suggestion for an unknown key: one of this name in another section, or a similar one; None without one."""
    key, known = place.path[-1], _siblings(place)
    section = "".join(f"{name}." for name in place.path[:-1])
    namesakes = [path for path in paths if path.endswith(f".{key}")]
    if namesakes and not difflib.get_close_matches(key, known, n=1):
        return f"did you mean {' or '.join(namesakes[:3])}?"
    below = {path.rsplit(".", 1)[-1]: path for path in paths if section and path.startswith(section)}
    if (close := difflib.get_close_matches(key, below, n=1)) and not difflib.get_close_matches(key, known, n=1):
        return f"did you mean {below[close[0]]}?"
    if close := difflib.get_close_matches(key, known, n=1):
        return f"did you mean {close[0]}?"
    return None


def _tails(path: str) -> list[str]:
    """The last two names of a path, or more, as one name."""
    names = path.split(".")
    return ["_".join(names[at:]) for at in range(len(names) - 1)]


def _first_key(place: _Place) -> str:
    """".key" that starts a section on the command line; "" for a plain field."""
    if sections_of_values(place.annotation):
        return ".NAME.type"
    members = sections_of(place.annotation)
    keys = [key for member in members for key, info in member.model_fields.items()
            if info.is_required() or key == "path"]
    return f".{keys[0]}" if keys else ""


def _rule(place: _Place, problem: Any) -> str:
    """The values that are allowed."""
    kind, context = problem["type"], problem.get("ctx") or {}
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        return f"must be {words} {context[key]:g}"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", str(context["expected"])) or [str(context["expected"])]
        return f"must be one of {', '.join(allowed)}"
    if kind == "too_short":
        return f"must have at least {context['min_length']}"
    if kind in _SECTION_TYPES:
        members = sections_of(place.annotation)
        if has_short_form(place.annotation):
            return f"must be one of {', '.join(str(type_tag(member)) for member in members)}, or a section with `type`"
        keys = ", ".join(members[0].model_fields) if members else "names of your choice"
        return f"is a section; give it keys ({keys})"
    return _SCALARS.get(kind) or problem["msg"][:1].lower() + problem["msg"][1:]


def _sentence(place: _Place) -> str:
    info = place.parent.model_fields.get(place.path[-1]) if place.parent else None
    return f" ({' '.join(info.description.split()).rstrip('.')})" if info and info.description else ""


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def origin(path: tuple[str, ...], layers: list[Layer]) -> str:
    """' [file:line]' of the value, or of the nearest enclosing section."""
    for end in range(len(path), 0, -1):
        for layer in reversed(layers):
            if place := layer.origins.get(path[:end]):
                return f" [{place}]"
    return ""


def _origin_within(path: tuple[str, ...], text: str, layers: list[Layer]) -> str:
    """Origin of a problem with a whole section: that of the last key which `text` mentions (the command line may have
    set it), otherwise that of the section."""
    for layer in reversed(layers[1:]):
        for keys, place in layer.origins.items():
            if keys[: len(path)] == path and re.search(rf"\b{re.escape(keys[-1])}\b", text):
                return f" [{place}]"
    return origin(path, layers)
