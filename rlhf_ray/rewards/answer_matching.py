"""Rules that compare a response with the row's answer: exact text, or numbers compared as decimals (never
evaluated)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from decimal import Context, Decimal
from typing import Any

from rlhf_ray.config.rewards import ExactMatchReward, NumberReward
from rlhf_ray.rewards.rules import RuleSource, Verdict, after_marker, answer_text

# A sign only where it is no subtraction or range; 1,000 with groups of three; .5 without a leading zero; 3/4; 1.5e3.
_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.,)\]}}])[-+])?\$?(?:\\[dt]?frac\s*{{\s*(?P<top>-?[0-9]+)\s*}}\s*{{\s*(?P<below>-?[0-9]+)\s*}}"
    rf"|(?P<value>{_PLAIN})(?:[eE](?P<power>[-+]?[0-9]{{1,4}})(?![\w])|/(?P<under>[0-9]+(?:\.[0-9]+)?))?)",
    re.ASCII,
)
_DIGITS = 60
"""Of a quotient, at least."""


def number_source(name: str, config: NumberReward) -> RuleSource:
    """The source of a section of `rewards`."""

    def rule(response: str, answer: Any) -> Verdict:
        return number_match(response, answer, config.after, config.tolerance)

    return RuleSource(name, config, rule, config.answer, lambda answer: has_number(answer, config.after))


def number_match(response: str, answer: Any, after: str | None, tolerance: float) -> Verdict:
    """Compare the response's number with the answer's. The source refuses an answer without a number."""
    given, wanted = number_in(response, after), _wanted(answer, after)
    if given is None:
        return Verdict.UNREADABLE
    if wanted is None:
        return Verdict.WRONG
    exact = _context(given, wanted)
    difference = exact.abs(exact.subtract(given, wanted))
    near = not difference.is_nan() and difference <= Decimal(repr(tolerance))
    return Verdict.RIGHT if near else Verdict.WRONG


def number_in(text: str, after: str | None = None) -> Decimal | None:
    """The number of a text: the first one after the marker, or the last one without a marker; None for none."""
    text = text.replace("\N{MINUS SIGN}", "-")
    part = after_marker(text, after)
    if part is None:
        return None
    numbers = [value for match in _NUMBER.finditer(part) if (value := _value(match)) is not None]
    return numbers[0 if after else -1] if numbers else None


def has_number(answer: Any, after: str | None) -> bool:
    """Whether a row's answer contains a number."""
    return _wanted(answer, after) is not None


def _wanted(answer: Any, after: str | None) -> Decimal | None:
    text = answer_text(answer)
    if text is None:
        return None
    marked = after is not None and after in text
    return number_in(text, after if marked else None)


def _value(match: re.Match[str]) -> Decimal | None:
    """The matched number; None after a division by zero, or out of range."""
    top, below = match["top"] or match["value"], match["below"] or match["under"]
    number = Decimal(top.replace(",", "") + (f"e{match['power']}" if match["power"] else ""))
    if below is not None:
        number = _context(number).divide(number, Decimal(below))
    if match["sign"] == "-":
        number = number.copy_negate()
    return number if number.is_finite() else None


def _context(*numbers: Decimal) -> Context:
    """Arithmetic in which sums and differences of these numbers are exact. What is out of range becomes infinity or
    NaN, which equal no number."""
    digits = [number.as_tuple() for number in numbers]
    highest = max(len(n.digits) + int(n.exponent) for n in digits)
    return Context(prec=max(_DIGITS, highest - min(int(n.exponent) for n in digits) + 1), traps=[])


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
