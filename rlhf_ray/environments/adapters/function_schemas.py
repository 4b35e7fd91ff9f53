"""JSON schemas of tools as chat templates take them: {"type": "function", "function": {...}}."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

MOST_REFERENCES = 1000
"""References of a schema that are written out. A few definitions that refer to each other twice become millions."""


class _HasNoEnd(Exception):
    """A definition contains itself, or the schema becomes too long."""


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool that says its parameters by any JSON schema.

    References to definitions are written out, and `anyOf` with null becomes `nullable`, as in
    `transformers.utils.get_json_schema`: chat templates read `type` of each parameter. Where a parameter has none even
    so, or the schema is not that of an object with properties, the description ends with the whole schema as JSON.
    """
    definitions = parameters.get("$defs", parameters.get("definitions", {}))
    try:
        plain = _written_out(dict(parameters), definitions, frozenset(), itertools.count(1))
    except _HasNoEnd:
        plain = {key: value for key, value in parameters.items() if key not in ("$defs", "definitions")}
    properties = plain.get("properties", {})
    simple = isinstance(properties, dict) and all(isinstance(each, dict) and "type" in each
                                                  for each in properties.values())
    as_object = plain.get("type", "object") == "object" and not plain.keys() & {"anyOf", "oneOf", "allOf", "$ref"}
    if not (simple and as_object):
        description = f"{description}\nJSON schema of the arguments: {json.dumps(parameters, ensure_ascii=False)}"
        kept = properties if isinstance(properties, dict) else {}
        plain = {"properties": {name: _typed(each) for name, each in kept.items()},
                 "required": plain.get("required", [])}
    function = {"name": name, "description": description.strip(),
                "parameters": {"type": "object", "properties": plain.get("properties", {}),
                               "required": list(plain.get("required", []))}}
    return {"type": "function", "function": function}


def _typed(schema: Any) -> dict[str, Any]:
    """A schema with a type: of the first choice that has one, or that of an object."""
    if not isinstance(schema, dict):
        return {"type": "object"}
    choices = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    types = [each["type"] for each in (schema, *choices) if isinstance(each, dict) and "type" in each]
    return schema if "type" in schema else {"type": next(iter(types), "object")}


def _written_out(schema: Any, definitions: Mapping[str, Any], within: frozenset[str], references: Iterator[int]
                 ) -> Any:
    """A schema without references, titles, and `anyOf` with null.

    Args:
        within: names of the definitions that are being written out.
        references: counts those that are written out.

    Raises:
        _HasNoEnd: a definition contains itself, or there are more than `MOST_REFERENCES`.
    """
    if isinstance(schema, list):
        return [_written_out(each, definitions, within, references) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        name = reference.rpartition("/")[2]
        if name in within or next(references) > MOST_REFERENCES:
            raise _HasNoEnd
        found = definitions.get(name)
        if found is None:
            return schema
        others = {key: value for key, value in schema.items() if key != "$ref"}
        return _written_out({**found, **others}, definitions, within | {name}, references)
    choices = schema.get("anyOf")
    if isinstance(choices, list) and len(choices) == 2 and {"type": "null"} in choices:
        other: Any = next((each for each in choices if each != {"type": "null"}), {})
        others = {key: value for key, value in schema.items() if key not in ("anyOf", "title")}
        if others.get("default", 0) is None:
            del others["default"]
        return {**_written_out(other, definitions, within, references), **others, "nullable": True}
    kept = {key: value for key, value in schema.items() if key not in ("$defs", "definitions", "$schema")}
    kinds = [kind for kind in kept["type"] if kind != "null"] if isinstance(kept.get("type"), list) else []
    if len(kinds) == 1:
        kept |= {"type": kinds[0], "nullable": True}
    if isinstance(kept.get("title"), str):  # a property may be called title, too
        del kept["title"]
    return {key: {name: _written_out(each, definitions, within, references) for name, each in value.items()}
            if key == "properties" and isinstance(value, dict) else _written_out(value, definitions, within, references)
            for key, value in kept.items()}
