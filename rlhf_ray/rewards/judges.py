"""Verdicts of rules, and the rules that run in a process because they may not end on some texts: regular expressions
and JSON schemas.

That process calls `judge_pattern` or `judge_json`, which return one verdict per response. It starts with the run, so
this module imports the standard library alone, and jsonschema where there is a schema.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any


class Verdict(IntEnum):
    """The result of a rule for one response."""

    RIGHT = 1
    WRONG = 0
    UNREADABLE = -1
    """Wrong, because the response lacks what the rule needs: no number, no JSON, no marker."""


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
        return Verdict.RIGHT if given is not None and given.split() == words(answer) else Verdict.WRONG

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
        super().__init__(f"no verdict within {timeout_s:g} s (timeout_s); simplify the pattern or the schema (nested "
                         "repetitions such as (a+)+, and a schema that refers to itself twice, can take for ever), or "
                         "raise timeout_s")
        self.sample = sample


def answer_text(answer: Any) -> str | None:
    """An answer as text: "5" for the number 5.0, as parquet and JSON may give a whole number. None for what has no one
    text: a list, an object, bytes, null, a number that is not finite."""
    if isinstance(answer, list | dict | bytes | None) or (isinstance(answer, float) and not math.isfinite(answer)):
        return None
    return str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer)


def words(answer: Any) -> list[str]:
    """The words of a row's answer; none if it is no text."""
    return (answer_text(answer) or "").split()


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
