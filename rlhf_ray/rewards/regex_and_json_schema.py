"""Regular expressions and JSON schemas as rewards. Both may not end on some texts, so they run in a process.

That process calls `judge_pattern` and `judge_json`, which return one verdict per response.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_ray.config.rewards import JSONSchemaReward, RegexReward
from rlhf_ray.errors import ConfigError
from rlhf_ray.rewards.rules import GuardedRuleSource, Verdict, answer_text

GRACE_S = 5.0
"""Time beyond the deadline of a chunk after which the process, which should have reported it, is killed."""


def regex_source(name: str, config: RegexReward) -> GuardedRuleSource:
    """The source of a section of `rewards`."""
    settings = {"what": f"pattern {config.pattern!r}", "pattern": config.pattern, "match": config.match,
                "group": config.group, "timeout_s": config.timeout_s}
    column = None if config.group is None else config.answer
    return GuardedRuleSource(name, config, f"{__name__}:judge_pattern", settings, column, config.timeout_s + GRACE_S,
                             (lambda _: True) if column is None else lambda answer: bool(_words(answer)),
                             lambda request: request.prefill + request.text(config.keep_special_tokens))


def json_schema_source(name: str, config: JSONSchemaReward) -> GuardedRuleSource:
    """The source of a section of `rewards`.

    Raises:
        ConfigError: the schema's file cannot be read, or the schema is invalid.
    """
    settings = {"what": "JSON schema", "schema": read_schema(config.accepts, f"rewards.{name}.accepts"),
                "timeout_s": config.timeout_s}
    return GuardedRuleSource(name, config, f"{__name__}:judge_json", settings, config.answer,
                             config.timeout_s + GRACE_S, is_json)


def judge_pattern(settings: dict[str, Any], responses: Sequence[str], answers: Sequence[Any]) -> list[Verdict]:
    """Verdicts of a regular expression."""
    pattern = compiled(settings["pattern"])
    find = pattern.search if settings["match"] == "search" else pattern.fullmatch

    def verdict(response: str, answer: Any) -> Verdict:
        match = find(response if settings["match"] == "search" else response.strip())
        if match is None:
            return Verdict.WRONG if settings["group"] is None else Verdict.UNREADABLE
        if settings["group"] is None:
            return Verdict.RIGHT
        given = match[settings["group"]]
        return Verdict.RIGHT if given is not None and given.split() == _words(answer) else Verdict.WRONG

    return _one_by_one(verdict, responses, answers, settings["timeout_s"])


def judge_json(settings: dict[str, Any], responses: Sequence[str], answers: Sequence[Any]) -> list[Verdict]:
    """Verdicts of a JSON schema."""
    validator = schema_validator(settings["schema"])

    def verdict(response: str, answer: Any) -> Verdict:
        try:
            value = json.loads(response, parse_constant=_refused)
        except (ValueError, RecursionError):
            return Verdict.UNREADABLE
        try:
            fits = validator.is_valid(value) and (answer is None or same_json(value, parsed(answer)))
        except (RecursionError, OverflowError):  # nested too deeply; a number too large to divide
            fits = False
        return Verdict.RIGHT if fits else Verdict.WRONG

    return _one_by_one(verdict, responses, answers, settings["timeout_s"])


def compiled(pattern: str) -> re.Pattern[str]:
    """The compiled pattern with the flags of rewards. Raises re.error when it is invalid."""
    return re.compile(pattern, re.DOTALL | re.MULTILINE)


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


def schema_validator(schema: Any) -> Any:
    """A validator without downloads: references beyond the schema itself are errors."""
    import jsonschema
    from referencing import Registry

    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, registry=Registry())


def parsed(answer: Any) -> Any:
    """An answer as a JSON value: a text that is JSON is parsed."""
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer, parse_constant=_refused)
    except ValueError:
        return answer


def same_json(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_json, a, b))
    return bool(a == b)


class TooSlow(Exception):
    """The deadline passed while a response was evaluated."""

    def __init__(self, timeout_s: float, sample: int) -> None:
        super().__init__(f"no verdict within {timeout_s:g} s (timeout_s); simplify the pattern (nested repetitions "
                         "such as (a+)+ can take for ever), or raise timeout_s")
        self.sample = sample


def _words(answer: Any) -> list[str]:
    """The words of a row's answer; none if it is no text."""
    return (answer_text(answer) or "").split()


def is_json(answer: Any) -> bool:
    """Whether a row's answer is a JSON value, without numbers that are not finite."""
    try:
        json.dumps(answer, allow_nan=False, default=str)
    except (ValueError, RecursionError):
        return False
    return answer is not None


def _one_by_one(
    verdict: Callable[[str, Any], Verdict], responses: Sequence[str], answers: Sequence[Any], timeout_s: float
) -> list[Verdict]:
    verdicts: list[Verdict] = []
    with _alarm(timeout_s, lambda: len(verdicts)):
        for response, answer in zip(responses, answers, strict=True):
            verdicts.append(verdict(response, answer))
    return verdicts


@contextmanager
def _alarm(timeout_s: float, at: Callable[[], int]) -> Iterator[None]:
    """A deadline by signal, which interrupts `re` during a match. For the main thread of the rule's own process.

    Raises:
        TooSlow: the deadline has passed; `at` returns the number of the sample being evaluated.
    """

    def expire(*_: Any) -> None:
        raise TooSlow(timeout_s, at())

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
