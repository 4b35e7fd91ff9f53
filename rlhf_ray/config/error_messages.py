"""Turns pydantic's errors into one message with each field, its value, its origin and the fix."""

import difflib
import re
from dataclasses import dataclass
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
        line = _line(cls, _place(cls, problem["loc"]), problem, layers)
        if line not in lines:
            lines.append(line)
    return "the configuration cannot run:\n" + "\n".join(f"  {line}" for line in lines)


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


def _line(cls: type[BaseModel], place: _Place, problem: Any, layers: list[Layer]) -> str:
    kind, name = problem["type"], ".".join(place.path)
    if kind == "value_error":  # our own validators already give complete messages
        text = problem["msg"].removeprefix("Value error, ")
        return f"{name}: {text}{_origin_within(place.path, text, layers)}"
    if kind == "missing":
        return f"{name}: is required{_sentence(place)}; set it in the file or with --{name}{_first_key(place)}=..."
    if kind == "extra_forbidden":
        return f"{name}: unknown key; {_meant(cls, place)}{origin(place.path, layers)}"
    if kind in _TYPE_ERRORS:
        types = ", ".join(tag for member in sections_of(place.annotation) if (tag := type_tag(member)))
        given = problem["input"].get("type") if isinstance(problem["input"], dict) else None
        what = f"is required (one of {types})" if given is None else f"must be one of {types}"
        shown = "" if given is None else f"={given!r}"
        return f"{name}.type{shown}: {what}{origin((*place.path, 'type'), layers)}"
    return f"{name}={_shortened(problem['input'])}: {_rule(place, problem)}{origin(place.path, layers)}"


NAMES_ELSEWHERE = {
    "num_generations": "coordinator.samples_per_prompt",
    "beta": "algorithm.kl.coef",
    "num_iterations": "algorithm.epochs",
    "max_completion_length": "generator.sampling.max_tokens",
    "max_prompt_length": "prompts.max_tokens",
    "reward_funcs": "rewards",
    "lr": "policy.optimizer.learning_rate",
    "whiten_advantages": "algorithm.estimator.whiten",
}
"""Names of other trainers -> field."""


def _meant(cls: type[BaseModel], place: _Place) -> str:
    """Suggestion for an unknown key: what other trainers call so, a similar one, or one of the same name in another
    section."""
    elsewhere = NAMES_ELSEWHERE.get(place.path[-1], "")
    if elsewhere.partition(".")[0] in cls.model_fields:
        return f"did you mean {elsewhere}?"
    key, known = place.path[-1], list(place.parent.model_fields) if place.parent else []
    paths = [f.path for f in describe_fields(cls)]
    if place.branch and "." not in key and ".".join(place.path) in paths:  # of the other section of a union
        return f"it does not go with the other keys of {place.path[-2]}; remove it"
    section = "".join(f"{name}." for name in place.path[:-1])
    if nested := [path for path in paths if section and path.startswith(section) and path.endswith(f".{key}")]:
        return f"did you mean {' or '.join(nested[:3])}?"
    if nested := [path for path in paths if path.startswith(section) and key in _tails(path)]:  # kl_coef: kl.coef
        return f"did you mean {' or '.join(nested[:3])}?"
    namesakes = [path for path in paths if path.endswith(f".{key}")]
    if namesakes and not difflib.get_close_matches(key, known, n=1):
        return f"did you mean {' or '.join(namesakes[:3])}?"
    below = {path.rsplit(".", 1)[-1]: path for path in paths if section and path.startswith(section)}
    if (close := difflib.get_close_matches(key, below, n=1)) and not difflib.get_close_matches(key, known, n=1):
        return f"did you mean {below[close[0]]}?"
    return suggestion(key, known)


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
