"""The response must be the answer, but for differences that do not count."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from typing import Any

from rlhf_ray.config.rewards import ExactMatchReward
from rlhf_ray.rewards.rules import RuleSource, Verdict, after_marker


def exact_match_source(name: str, config: ExactMatchReward) -> RuleSource:
    """The source of a section of `rewards`."""

    def rule(response: str, answer: Any) -> Verdict:
        return exact_match(response, str(answer), config.after, config.ignore)

    return RuleSource(name, config, rule, config.answer)


def exact_match(response: str, answer: str, after: str | None, ignore: Collection[str]) -> Verdict:
    """Compare two texts; the answer may carry the marker too, as the answers of GSM8K do."""
    given = after_marker(response, after)
    if given is None:
        return Verdict.UNREADABLE
    wanted = after_marker(answer, after)
    same = normalise(given, ignore) == normalise(answer if wanted is None else wanted, ignore)
    return Verdict.RIGHT if same else Verdict.WRONG


def normalise(text: str, ignore: Collection[str]) -> str:
    """The text without the differences named in `ignore`: "case", "punctuation", "space" (runs of it, and around)."""
    if "case" in ignore:
        text = text.casefold()
    if "punctuation" in ignore:
        text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
    return " ".join(text.split()) if "space" in ignore else text
