"""A reward by tests: the program of a response is run in a sandbox, and scored by the tests of its row that it passes.

A program that fails, hangs, is killed or cannot be found is wrong. A sandbox that does not work is an error of the run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from rlhf_ray.config.rewards import CodeReward
from rlhf_ray.errors import RewardError, SampleError
from rlhf_ray.rewards.code_tests import CodeTest, tests_of
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, RewardSource, all_ended, sample_names
from rlhf_ray.user_code.process import PrintedLines
from rlhf_ray.user_code.sandbox import Limits, SandboxBroken, SandboxPool

BLOCK = re.compile(r"^[ \t]*```(?:python|python3|py)[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
"""A fenced block of Python; the last one may be cut off."""
THOUGHT = "</think>"


class CodeSource(RewardSource):
    """Runs the tests of several responses side by side, those of one response one after the other."""

    def __init__(self, name: str, config: CodeReward) -> None:
        self._name, self._config = name, config
        who = f"the reward rewards.{name}"
        self._pool = SandboxPool(who, Limits(**config.sandbox.limits), config.processes,
                                 PrintedLines(f"rewards.{name}", who))

    async def start(self) -> None:
        """Start the sandbox, which tries what holds programs back. Raises RewardError when it does not work."""
        try:
            await self._pool.start()
        except SandboxBroken as error:
            raise RewardError(str(error)) from None

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """A score for each response, from `wrong` to `right`. Responses without a program are counted as failures.

        Raises:
            RewardError: a row has no tests, or unusable ones (SampleError); or the sandbox does not work.
        """
        tests = [self._tests(request) for request in requests]
        programs = [program_of(request, self._config.program) for request in requests]
        shares = await all_ended(*map(self._share, programs, tests))
        wrong, right = self._config.wrong, self._config.right
        scores = [wrong + share * (right - wrong) for share in shares]
        return RewardAnswer(np.asarray(scores, np.float32), failures=programs.count(None))

    def _tests(self, request: RewardRequest) -> list[CodeTest]:
        column = self._config.tests
        try:
            return tests_of(request.metadata.get(column))
        except ValueError as error:
            raise SampleError(f"rewards.{self._name}.tests={column!r}: {sample_names([request.key])}: {error}. Correct "
                              "the row or remove it") from None

    async def _share(self, program: str | None, tests: list[CodeTest]) -> float:
        """The share of the tests that a program passes; with `score: all`, 0 or 1."""
        passed, left = 0, self._config.total_s
        for test in tests if program is not None else ():
            if left <= 0:
                break
            try:
                outcome = await self._pool.run(test.job(program or "", min(left, self._config.timeout_s)))
            except SandboxBroken as error:
                raise RewardError(str(error)) from None
            left -= outcome.seconds
            passed += test.passed(outcome)
            if self._config.score == "all" and not test.passed(outcome):
                return 0.0
        return passed / len(tests) if self._config.score == "share" else float(passed == len(tests))

    async def stop(self) -> None:
        """End the sandbox with the programs in it."""
        await self._pool.stop()


def program_of(request: RewardRequest, where: str) -> str | None:
    """The program of a response; None if it has none.

    Args:
        where: `CodeReward.program`.
    """
    text = request.text()
    if where == "response":
        return text if text.strip() else None
    blocks: list[str] = BLOCK.findall(text.rpartition(THOUGHT)[2])
    return blocks[-1] if blocks and blocks[-1].strip() else None
