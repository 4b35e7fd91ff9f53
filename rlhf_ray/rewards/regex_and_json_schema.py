"""Regular expressions and JSON schemas as rewards. Both may not end on some texts, so they run in a process
(`judges.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf_ray.config.rewards import JSONSchemaReward, RegexReward
from rlhf_ray.errors import ConfigError
from rlhf_ray.rewards.judges import judge_json, judge_pattern, words
from rlhf_ray.rewards.rules import GuardedRuleSource

GRACE_S = 5.0
"""Time beyond the deadline of a chunk after which the process, which should have reported it, is killed."""


def regex_source(name: str, config: RegexReward) -> GuardedRuleSource:
    """The source of a section of `rewards`."""
    settings = {"what": f"pattern {config.pattern!r}", "pattern": config.pattern, "match": config.match,
                "group": config.group, "timeout_s": config.timeout_s}
    column = None if config.group is None else config.answer
    return GuardedRuleSource(name, config, judge_pattern, settings, column, config.timeout_s + GRACE_S,
                             (lambda _: True) if column is None else lambda answer: bool(words(answer)),
                             lambda request: request.prefill + request.text(config.keep_special_tokens))


def json_schema_source(name: str, config: JSONSchemaReward) -> GuardedRuleSource:
    """The source of a section of `rewards`.

    Raises:
        ConfigError: the schema's file cannot be read, or the schema is invalid.
    """
    settings = {"what": "JSON schema", "schema": read_schema(config.accepts, f"rewards.{name}.accepts"),
                "timeout_s": config.timeout_s}
    return GuardedRuleSource(name, config, judge_json, settings, config.answer, config.timeout_s + GRACE_S,
                             is_json)


def read_schema(accepts: dict[str, Any] | str, field: str) -> dict[str, Any] | bool:
    """The schema of a configuration: given inline, or read from a file.

    Raises:
        ConfigError: no such file, not JSON, or not a schema.
    """
    import jsonschema

    schema: Any = accepts
    if isinstance(accepts, str):
        try:
            schema = json.loads(Path(accepts).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{field}={accepts!r} cannot be read as a JSON schema: {error}; give the path of a JSON "
                              "file") from None
    try:
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{field} is not a JSON schema: {error.message} at {error.json_path}; correct it") from None
    if isinstance(schema, dict):
        _check_references(schema, field)
    return schema


def _check_references(schema: dict[str, Any], field: str) -> None:
    """Resolve every reference of a schema: the first response that leads to one that cannot be would end the run.

    Raises:
        ConfigError: names the reference.
    """
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    def check(resource: Any, resolver: Any) -> None:
        contents = resource.contents if isinstance(resource.contents, dict) else {}
        for key in ("$ref", "$dynamicRef"):
            if isinstance(reference := contents.get(key), str):
                try:
                    resolver.lookup(reference)
                except Unresolvable:
                    raise ConfigError(f"{field} has {key}: {reference!r}, which is nowhere in the schema (nothing is "
                                      "downloaded); put its definition into $defs") from None
        for inner in resource.subresources():
            check(inner, resolver.in_subresource(inner))

    whole = Resource.from_contents(schema, default_specification=DRAFT202012)
    check(whole, Registry().resolver_with_root(whole))


def is_json(answer: Any) -> bool:
    """Whether a row's answer is a JSON value, without numbers that are not finite."""
    try:
        json.dumps(answer, allow_nan=False, default=str)
    except (ValueError, RecursionError):
        return False
    return answer is not None
