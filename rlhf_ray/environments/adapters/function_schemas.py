"""JSON schemas of tools as chat templates take them: {"type": "function", "function": {...}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DEEPEST = 20
"""Definitions within each other that are written out; a recursive one would have no end."""


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool that says its parameters by any JSON schema.

    References to definitions are written out, and `anyOf` with null becomes `nullable`, as in
    `transformers.utils.get_json_schema`: chat templates read `type` of each parameter. Where a parameter has none even
    so, or the schema is not that of an object with properties, the description ends with the whole schema as JSON.
    """
    try:
        plain = _written_out(dict(parameters), parameters.get("$defs", parameters.get("definitions", {})), 0)
    except RecursionError:
        plain = {}
    properties = plain.get("properties", {})
    simple = isinstance(properties, dict) and all(isinstance(each, dict) and "type" in each
                                                  for each in properties.values())
    as_object = plain.get("type", "object") == "object" and not plain.keys() & {"anyOf", "oneOf", "allOf", "$ref"}
    if not (simple and as_object):
        description = f"{description}\nJSON schema of the arguments: {json.dumps(parameters, ensure_ascii=False)}"
        kept = properties if isinstance(properties, dict) else {}
        plain = {"properties": {key: {"type": "object", "description": "see the JSON schema", **_if_dict(each)}
                                if not (isinstance(each, dict) and "type" in each) else each
                                for key, each in kept.items()},
                 "required": plain.get("required", [])}
    function = {"name": name, "description": description.strip(),
                "parameters": {"type": "object", "properties": plain.get("properties", {}),
                               "required": list(plain.get("required", []))}}
    return {"type": "function", "function": function}


def _if_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _written_out(schema: Any, definitions: Mapping[str, Any], depth: int) -> Any:
    """A schema without references, titles, and `anyOf` with null.

    Raises:
        RecursionError: a definition contains itself.
    """
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(schema, list):
        return [_written_out(each, definitions, depth) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        found = definitions.get(reference.rpartition("/")[2])
        if found is None:
            return schema
        others = {key: value for key, value in schema.items() if key != "$ref"}
        return _written_out({**found, **others}, definitions, depth + 1)
    choices = schema.get("anyOf")
    if isinstance(choices, list) and len(choices) == 2 and {"type": "null"} in choices:
        other: Any = next((each for each in choices if each != {"type": "null"}), {})
        others = {key: value for key, value in schema.items() if key not in ("anyOf", "title")}
        if others.get("default", 0) is None:
            del others["default"]
        return {**_written_out(other, definitions, depth + 1), **others, "nullable": True}
    kept = {key: value for key, value in schema.items() if key not in ("$defs", "definitions", "$schema")}
    if isinstance(kept.get("title"), str):  # a property may be called title, too
        del kept["title"]
    return {key: {name: _written_out(each, definitions, depth + 1) for name, each in value.items()}
            if key == "properties" and isinstance(value, dict) else _written_out(value, definitions, depth + 1)
            for key, value in kept.items()}
