"""Checks rows of prompts for what rewards read in them, before responses are sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_ray.config.rewards import CodeReward, HTTPReward, NumberReward, RegexReward, RewardConfig, VerifiableReward
from rlhf_ray.data.rows import brief
from rlhf_ray.errors import DataError
from rlhf_ray.rewards.code_tests import tests_of
from rlhf_ray.rewards.rule_sources import rule_source


class AnswerCheck:
    """Whether rows have what a reward compares responses with."""

    def __init__(self, section: str, name: str, reward: RewardConfig) -> None:
        """`section`: names the reward in messages."""
        self._section, self._reward, self.columns = section, reward, _columns(reward)
        self._usable: Callable[[Any], bool] = lambda _: True
        if self.columns and isinstance(reward, VerifiableReward) and not isinstance(reward, CodeReward):
            self._usable = rule_source(name, reward).usable

    def row(self, row: Mapping[str, Any], place: str) -> None:
        """Check a row's columns other than the prompt.

        Raises:
            DataError: names the place, the column and the value.
        """
        for key, column in self.columns:
            where = f"{self._section}.{key}={column!r}: {place}"
            if column not in row:
                raise DataError(f"{where} has no such column; other columns: {', '.join(sorted(row)) or 'none'}")
            if isinstance(self._reward, CodeReward):
                _require_tests(row[column], where)
            if not self._usable(row[column]):
                raise DataError(f"{where} is {brief(row[column])}, which a reward of type {self._reward.type} cannot "
                                f"compare with a response; name the column with the answer, or fix the row{self._hint}")

    @property
    def _hint(self) -> str:
        if not isinstance(self._reward, NumberReward):
            return ""
        return ("; an answer is one number (1,000, -3.5, 3/4) or a text whose last line has one: use exact_match or a "
                "function for others" + ("" if self._reward.after else ", and `after` for the text before the number"))


def _require_tests(value: Any, where: str) -> None:
    try:
        tests_of(value)
    except ValueError as error:
        raise DataError(f"{where} is {brief(value)}: {error}; name the column with the tests, or fix the row") from None


def _columns(reward: RewardConfig) -> list[tuple[str, str]]:
    """Fields of a reward that name columns, with the columns."""
    if isinstance(reward, HTTPReward):
        return [("columns", column) for column in reward.columns]
    if isinstance(reward, CodeReward):
        return [("tests", reward.tests)]
    column = getattr(reward, "answer", None)
    if column is None or (isinstance(reward, RegexReward) and reward.group is None):
        return []
    return [("answer", column)]
