"""Tests of programs: how a row gives them, what each runs, and when it is passed.

A row gives a program that asserts, a list of such programs, or an object as APPS, LiveCodeBench and verl's `prime_code`
have it: `inputs` and `outputs` of the same length, for stdin and stdout, or with `fn_name` for arguments and results of
a function. Any of them may be JSON in a text.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from rlhf_ray.user_code.sandbox import Job, Outcome

KEYS = ("inputs", "outputs", "fn_name", "asserts", "setup")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
MOST_DIGITS = 1000
"""Characters of a number that is compared as one."""


@dataclass(frozen=True)
class CodeTest:
    """One test: a run of the program."""

    setup: str = ""
    """Code before the program."""
    asserts: str | None = None
    """Code after it, which must come to its end."""
    stdin: str = ""
    function: str | None = None
    arguments: tuple[Any, ...] = ()
    expected: Any = None
    """What it must print to stdout, or what the function must return. It never enters the sandbox."""

    def job(self, program: str, timeout_s: float) -> Job:
        """What the sandbox runs."""
        return Job(program, timeout_s, self.stdin, self.setup, self.asserts, self.function, self.arguments)

    def passed(self, outcome: Outcome) -> bool:
        """Whether the program did what is expected."""
        if self.asserts is not None:
            return outcome.verdict is not None
        if self.function is not None:
            return outcome.verdict is not None and same_value(outcome.verdict, self.expected)
        return outcome.status == 0 and same_lines(outcome.output, self.expected)


def read_tests(given: Any) -> list[CodeTest]:
    """The tests of a row's column.

    Raises:
        ValueError: it has none, or what is none; says what.
    """
    if isinstance(given, str):
        given = _parsed(given)
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list):
        given = {"asserts": given}
    if not isinstance(given, dict):
        raise ValueError("tests are a text, a list of texts, or an object with inputs and outputs")
    if other := [key for key in given if key not in KEYS]:
        raise ValueError(f"an object of tests has the keys {', '.join(KEYS)}, and not {other[0]!r}")
    setup = given.get("setup") or ""
    if not isinstance(setup, str):
        raise ValueError("setup must be text")
    if "asserts" in given:
        return _asserts(given, setup)
    return _pairs(given, setup)


def _parsed(text: str) -> Any:
    """A text that is JSON of a list or object, as that; any other as it is."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _asserts(given: dict[str, Any], setup: str) -> list[CodeTest]:
    asserts = given["asserts"]
    if "inputs" in given or "outputs" in given:
        raise ValueError("an object of tests has asserts, or inputs and outputs")
    if not isinstance(asserts, list) or not asserts or not all(isinstance(a, str) and a.strip() for a in asserts):
        raise ValueError("asserts must be a list of programs, at least one and none empty")
    for each in asserts:
        try:
            statements = ast.parse(each).body
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"a test is no program: {error}") from None
        if not any(map(_does_something, statements)):
            names = [statement.name for statement in statements if isinstance(statement, DEFINITIONS)]
            defined = f" it defines {names[-1]}; add a call of it, such as {names[-1]}(solution)" if names else ""
            raise ValueError(f"a test asserts and calls nothing, so every program would pass it: {each!r:.60};{defined}"
                             .rstrip(";"))
    return [CodeTest(setup=setup, asserts=each) for each in asserts]


def _does_something(statement: ast.stmt) -> bool:
    """Whether a statement can fail because of a program: it asserts, raises or calls."""
    return not isinstance(statement, DEFINITIONS) and any(
        isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(statement))


def _pairs(given: dict[str, Any], setup: str) -> list[CodeTest]:
    inputs, outputs, function = given.get("inputs"), given.get("outputs"), given.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs must be lists of the same length, at least one of each")
    if function is None:
        return [CodeTest(setup=setup, stdin=_text(a, "inputs"), expected=_text(b, "outputs"))
                for a, b in zip(inputs, outputs, strict=True)]
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"fn_name={function!r} must be the name of a function")
    return [CodeTest(setup=setup, function=function, arguments=tuple(_arguments(a)), expected=_result(b))
            for a, b in zip(inputs, outputs, strict=True)]


def _text(value: Any, what: str) -> str:
    """Text, or lines of it as APPS has them."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{what} for stdin and stdout are texts, and {value!r:.60} is none; with arguments of a "
                         "function, fn_name is its name")
    return value


def _arguments(value: Any) -> list[Any]:
    """A list of arguments, or a text with one of them in JSON a line, as LiveCodeBench has it."""
    try:
        value = [json.loads(line) for line in value.split("\n")] if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"inputs: {value!r:.60} is no argument in JSON a line: {error}") from None
    if not isinstance(value, list):
        raise ValueError(f"inputs: {value!r:.60} is no list of arguments")
    return value


def _result(value: Any) -> Any:
    """A value, or a text that is one in JSON, as LiveCodeBench has it."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"outputs: {value!r:.60} is no result in JSON (a text has quotes in it): {error}") from None


def same_lines(printed: str, expected: str) -> bool:
    """Whether lines are the same but for space around them and around the whole, or have the same numbers:
    LiveCodeBench's rule (`lcb_runner/evaluation/testing_util.py`, `grade_stdio`)."""
    mine, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    if len(mine) != len(wanted):
        return False
    return all(a == b or _same_numbers(a, b) for a, b in zip(mine, wanted, strict=True))


def _same_numbers(mine: str, wanted: str) -> bool:
    words = mine.split(), wanted.split()
    if len(words[0]) != len(words[1]) or any(len(word) > MOST_DIGITS for word in (*words[0], *words[1])):
        return False
    try:
        return [Decimal(word) for word in words[0]] == [Decimal(word) for word in words[1]]
    except InvalidOperation:
        return False


def same_value(result: str, expected: Any) -> bool:
    """Whether a result in JSON is the expected value; tuples are lists there."""
    try:
        return bool(json.loads(result) == expected)
    except (ValueError, RecursionError):
        return False
