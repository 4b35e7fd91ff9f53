"""Schemas of tools as chat templates take them, from what servers say."""

import json

import pytest
from transformers.utils import get_json_schema

from rlhf_ray.environments.adapters.function_schemas import function_schema


def parameters(schema):
    return function_schema("f", "d", schema)["function"]["parameters"]


def test_an_optional_argument_is_as_transformers_writes_it():
    def f(a: str | None, b: list[int]):
        """d

        Args:
            a: x
            b: y
        """

    ours = function_schema("f", "d", {"title": "fArguments", "type": "object", "required": ["a", "b"], "properties": {
        "a": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "x", "title": "A"},
        "b": {"type": "array", "items": {"type": "integer"}, "description": "y", "title": "B"}}})
    assert ours == get_json_schema(f)


def test_references_are_written_out():
    found = parameters({"type": "object", "properties": {"to": {"$ref": "#/$defs/Place", "description": "where"}},
                        "$defs": {"Place": {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}},
                                  "City": {"enum": ["Ulm"], "type": "string"}}})
    assert found == {"type": "object", "required": [], "properties": {"to": {
        "type": "object", "description": "where", "properties": {"city": {"enum": ["Ulm"], "type": "string"}}}}}


def test_definitions_that_would_be_written_out_without_measure_stay_as_they_are():
    levels = {f"L{i}": {"type": "object", "properties": {side: {"$ref": f"#/$defs/L{i + 1}"} for side in "ab"}}
              for i in range(40)}
    levels["L40"] = {"type": "null"}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/L0"}}, "$defs": levels}
    found = function_schema("f", "d", schema)["function"]
    assert found["parameters"]["properties"] == {"a": {"type": "object"}}
    assert json.dumps(schema) in found["description"]


def test_an_argument_may_be_called_title_or_definitions():
    properties = {"title": {"type": "string"}, "definitions": {"type": "string"}}
    assert parameters({"type": "object", "properties": properties})["properties"] == properties


RECURSIVE = {"type": "object", "properties": {"tree": {"$ref": "#/$defs/T"}},
             "$defs": {"T": {"type": "object", "properties": {"left": {"$ref": "#/$defs/T"}}}}}
UNTYPED = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                                            "b": {"type": "integer"}}, "required": ["a"]}
CHOICE = {"oneOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}]}


@pytest.mark.parametrize("schema", [RECURSIVE, UNTYPED, CHOICE], ids=["recursive", "untyped", "choice"])
def test_what_templates_cannot_take_is_in_the_description_as_json(schema):
    function = function_schema("f", "d", schema)["function"]
    assert function["description"].startswith("d\nJSON schema of the arguments: {")
    assert all("type" in each for each in function["parameters"]["properties"].values())
    assert function["parameters"]["type"] == "object"


def test_arguments_with_types_stay_where_another_has_none():
    found = parameters(UNTYPED)
    assert found["properties"] == {"a": {"type": "string"}, "b": {"type": "integer"}} and found["required"] == ["a"]


def test_a_list_of_types_with_null_is_one_that_may_be_null():
    found = parameters({"type": "object", "properties": {"a": {"type": ["integer", "null"]}}})
    assert found["properties"] == {"a": {"type": "integer", "nullable": True}}


def test_a_tool_without_arguments_has_none():
    assert parameters({}) == parameters({"type": "object"}) == {"type": "object", "properties": {}, "required": []}
