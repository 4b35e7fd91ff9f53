"""Rules that compare a response with the row's answer: exact text, or numbers compared as decimals (never
evaluated)."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from decimal import Decimal
from typing import Any

from rlhf_ray.config.rewards import ExactMatchReward, NumberReward
from rlhf_ray.rewards.judges import Verdict, answer_text
from rlhf_ray.rewards.number_reading import exact_context, number_in, only_number
from rlhf_ray.rewards.rules import RuleSource, after_marker


def number_source(name: str, config: NumberReward) -> RuleSource:
    """The source of a section of `rewards`."""

    def rule(response: str, answer: Any) -> Verdict:
        return number_match(response, answer, config.after, config.tolerance)

    return RuleSource(name, config, rule, config.answer, lambda answer: has_number(answer, config.after))


def number_match(response: str, answer: Any, after: str | None, tolerance: float) -> Verdict:
    """Compare the response's number with the answer's. The source refuses an answer that is not one number."""
    given, wanted = number_in(response, after), _wanted(answer, after)
    if given is None:
        return Verdict.UNREADABLE
    if wanted is None or given.is_nan():
        return Verdict.WRONG
    exact = exact_context(given, wanted)
    difference = exact.abs(exact.subtract(given, wanted))
    near = not difference.is_nan() and difference <= Decimal(repr(tolerance))
    return Verdict.RIGHT if near else Verdict.WRONG


def has_number(answer: Any, after: str | None) -> bool:
    """Whether a row's answer is one number, or a text with one (after the marker, if it is there)."""
    return _wanted(answer, after) is not None


def _wanted(answer: Any, after: str | None) -> Decimal | None:
    text = answer_text(answer)
    if text is None:
        return None
    marked = after_marker(text, after)
    number = only_number(text if marked is None else marked)
    return None if number is None or number.is_nan() else number


def exact_match_source(name: str, config: ExactMatchReward) -> RuleSource:
    """The source of a section of `rewards`."""

    def rule(response: str, answer: Any) -> Verdict:
        return exact_match(response, answer, config.after, config.ignore)

    def usable(answer: Any) -> bool:
        return _text(answer, config.after, config.ignore) is not None

    return RuleSource(name, config, rule, config.answer, usable)


def exact_match(response: str, answer: Any, after: str | None, ignore: Collection[str]) -> Verdict:
    """Compare two texts; the answer may contain the marker too, as the answers of GSM8K do. The source refuses an
    answer without text."""
    given = after_marker(response, after)
    if given is None:
        return Verdict.UNREADABLE
    return Verdict.RIGHT if normalise(given, ignore) == _text(answer, after, ignore) else Verdict.WRONG


def _text(answer: Any, after: str | None, ignore: Collection[str]) -> str | None:
    """What a response has to say: the answer, or its part after the marker; None if that is blank or no text."""
    text = answer_text(answer) or ""
    marked = after_marker(text, after)
    wanted = normalise(text if marked is None else marked, ignore)
    return wanted if wanted.strip() else None


def normalise(text: str, ignore: Collection[str]) -> str:
    """The text without the differences named in `ignore`: "case", "punctuation", "space" (runs of it, and around)."""
    if "case" in ignore:
        text = text.casefold()
    if "punctuation" in ignore:
        text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
    return " ".join(text.split()) if "space" in ignore else text
