"""Rule-based rewards: a rule gives a verdict on a response and a row's answer; verdicts become scores.

Rules only read text: a response is never run as code. Rules that may not end on some texts (regular expressions, JSON
schemas) run in a process that can be killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_ray.config.rewards import VerifiableReward
from rlhf_ray.errors import SampleError
from rlhf_ray.rewards.function_source import KillableFunction
from rlhf_ray.rewards.judges import Verdict
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, RewardSource, sample_names, shown_sample

Rule = Callable[[str, Any], Verdict]
"""(response, answer) -> verdict."""
Judge = Callable[[dict[str, Any], Sequence[str], Sequence[Any]], list[Verdict]]
"""(settings, responses, answers) -> verdicts."""


class RuleSource(RewardSource):
    """A rule that is evaluated in this process."""

    def __init__(self, name: str, config: VerifiableReward, rule: Rule, column: str | None,
                 usable: Callable[[Any], bool] = lambda _: True) -> None:
        """
        Args:
            column: of the answers; None for a rule without answers.
            usable: whether a response can be compared with an answer.
        """
        self._name, self._config, self._rule, self._column, self.usable = name, config, rule, column, usable

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """`right` or `wrong` for each response.

        Raises:
            RewardError: a prompt's row has no answer, or an unusable one; names the sample.
        """
        answers = answers_of(requests, self._column, self._name, self.usable)
        verdicts = [self._rule(r.response, answer) for r, answer in zip(requests, answers, strict=True)]
        return verdicts_as_answer(verdicts, self._config)


class GuardedRuleSource:
    """A rule in a process of its own: a function of a module that is quick to import."""

    def __init__(self, name: str, config: VerifiableReward, judge: Judge, settings: dict[str, Any],
                 column: str | None, timeout_s: float, usable: Callable[[Any], bool],
                 read: Callable[[RewardRequest], str] = RewardRequest.text) -> None:
        """
        Args:
            settings: given to `judge`; `what` is the rule in words, for messages.
            read: the text of a request that the rule judges.
        """
        self._name, self._config, self._settings, self._column = name, config, settings, column
        self._read = read
        self.usable = usable
        self._process = KillableFunction(f"rewards.{name} ({settings['what']})",
                                         f"{judge.__module__}:{judge.__name__}",
                                         ("settings", "responses", "answers"), timeout_s)

    async def start(self) -> None:
        """Start the process."""
        await self._process.start()

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """`right` or `wrong` for each response.

        Raises:
            RewardError: a prompt's row has no answer, or an unusable one, or the rule failed or took too long; names
                the samples.
        """
        given = {"settings": self._settings, "responses": [self._read(r) for r in requests],
                 "answers": answers_of(requests, self._column, self._name, self.usable)}
        verdicts = await self._process.call(given, [shown_sample(r) for r in requests])
        return verdicts_as_answer(verdicts, self._config)

    async def stop(self) -> None:
        """End the process."""
        await self._process.stop()


def verdicts_as_answer(verdicts: Sequence[float], config: VerifiableReward) -> RewardAnswer:
    """Scores of verdicts; unreadable responses are wrong, and counted."""
    results = np.asarray(verdicts, dtype=np.int64)
    scores = np.where(results == Verdict.RIGHT, config.right, config.wrong).astype(np.float32)
    return RewardAnswer(scores, failures=int((results == Verdict.UNREADABLE).sum()))


def answers_of(requests: Sequence[RewardRequest], column: str | None, name: str,
               usable: Callable[[Any], bool]) -> list[Any]:
    """[N] the answers in the prompts' rows; None for each if the rule has no column.

    Raises:
        RewardError: a row has no such column, or one that is empty or unusable.
    """
    if column is None:
        return [None] * len(requests)
    for request in requests:
        if request.metadata.get(column) is None:
            raise SampleError(f"rewards.{name}.answer={column!r}: the prompt of {sample_names([request.key])} has no "
                              "such column or an empty one; the other columns of its row are "
                              f"{sorted(request.metadata)}. Add it")
        if not usable(request.metadata[column]):
            raise SampleError(f"rewards.{name}: {column}={request.metadata[column]!r} of "
                              f"{sample_names([request.key])} cannot be compared with a response; correct the row or "
                              "remove it")
    return [request.metadata[column] for request in requests]


def after_marker(text: str, marker: str | None) -> str | None:
    """The text after the last occurrence of the marker; the whole text if the marker is None; None if it is absent."""
    if marker is None:
        return text
    _, found, rest = text.rpartition(marker)
    return rest if found else None
