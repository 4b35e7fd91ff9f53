"""The comparison of generators with the learner on fixed tokens: at the start, and after each publication.

Digests prove that the bytes of a publication arrived. They do not prove that a generator computes with them: an engine
may keep a copy of a tensor that it made before, or load a tensor into another layer, and its samples look like samples.
So after each publication the learner and one generator, the next one each time, compute log-probabilities of the same
few tokens, and the gap between them is compared with the gap at version 0 and with what rounding explains. The learner
makes two passes over some 70 tokens for it and a generator one, and nothing waits for them before the next batch.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.errors import GeneratorMismatch, ModelError, WorkerLost
from rlhf_ray.models.generator_parity import SAMPLED, logprob_gap, tolerated_gap, tolerated_later, typical_gap
from rlhf_ray.records import GivenTokens, LearnerPass, Prompts, SampleKey
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.workers.calls import Call
from rlhf_ray.workers.dispatcher import finished
from rlhf_ray.workers.health_monitor import Decision
from rlhf_ray.workers.role_groups import RoleGroups

PHASE = "canary"
"""Under which the generators' working time is recorded."""


@dataclass(frozen=True)
class LearnerAnswer:
    """The learner's log-probabilities of the fixed tokens, under the weights of one version."""

    version: int
    logprobs: LearnerPass
    seconds: float
    """Working time of the learner."""


@dataclass(frozen=True)
class Comparison:
    """Result of one comparison."""

    version: int
    gaps: dict[int, float]
    """Gap in nats by the generator's rank (`typical_gap`). Generators that were lost meanwhile are left out."""
    bound: float
    """Largest gap that is tolerated."""
    moved: float | None
    """How far the update moved these log-probabilities, in nats; None at the first version of the learners."""
    seconds: float
    """Working time of the learner. The generator's passes are batched with its sampling, and nothing waits for them."""

    @property
    def gap(self) -> float:
        """The largest gap; 0 if all generators were lost."""
        return max(self.gaps.values(), default=0.0)

    @property
    def passes(self) -> bool:
        """Whether no gap is above the bound."""
        return self.gap <= self.bound

    @property
    def worst(self) -> str:
        """Name of the generator with the largest gap."""
        return f"generator/{max(self.gaps, key=lambda rank: self.gaps[rank])}"

    def mismatch(self) -> GeneratorMismatch | None:
        """The error of a comparison after a publication that does not pass."""
        if self.passes:
            return None
        moved = "" if self.moved is None else f"; the last update moved them by {self.moved:.3g}"
        return GeneratorMismatch(
            f"{self.worst} confirmed version {self.version} of the weights and does not compute with it: its "
            f"log-probabilities of fixed tokens differ by {self.gap:.3g} nats from the learner's, and "
            f"{self.bound:.3g} is tolerated{moved}")


class Canary:
    """Compares log-probabilities of `rows`.

    Example:
        canary = Canary(roles, given_rows(config, 1023), "models/policy")
        await canary.compare_at_start()
        canary.begin(1)  # version 1 was published
        error = await canary.mismatch()
    """

    def __init__(self, roles: RoleGroups, rows: GivenTokens, model: str, long_row: GivenTokens | None = None,
                 seed: int = 0) -> None:
        """
        Args:
            model: path of the model, for messages.
            long_row: a prompt nearly as long as the longest row of the run, for the comparison at the start.
            seed: of the tokens that are sampled after it.
        """
        self._roles, self._rows, self._model = roles, rows, model
        self._long_row, self._seed = long_row, seed
        self._dispatcher = roles.dispatcher(roles.generators)
        self._turn = -1
        """Number of the last comparison with one generator."""
        self._first_gap = self._first_noise = 0.0
        """`typical_gap` at version 0 of a generator, and of the learner's rounded pass."""
        self._learner: asyncio.Task[LearnerAnswer] | None = None
        """Of the newest version."""
        self._under_way: asyncio.Task[Comparison] | None = None
        """The comparison that nobody has waited for yet."""
        self._last: Comparison | None = None

    async def compare_at_start(self) -> float:
        """Compare all generators at version 0 with the learner, whose passes were compared with transformers' at its
        start; returns the largest gap (`logprob_gap`).

        Raises:
            ModelError: one computes another model.
        """
        self._learner = _started(self._answer(0, self._rows))
        ranks = self._roles.generators.ranks
        first, *answers = await asyncio.gather(self._learner, *(self._call(rank).value() for rank in ranks))
        learner = first.logprobs
        self._first_noise = typical_gap(learner.rounded, learner.values)
        self._first_gap = max(typical_gap(values, learner.values) for values, _ in answers)
        gaps = [self._checked(f"generator/{rank}", values, learner)
                for rank, (values, _) in zip(ranks, answers, strict=True)]
        if self._long_row is not None:
            gaps.append(await self._compare_long_row(ranks[0], self._long_row))
        return max(gaps)

    def _checked(self, generator: str, values: NDArray[np.float32], learner: LearnerPass) -> float:
        """The gap of a generator at version 0.

        Raises:
            ModelError: rounding does not explain it.
        """
        gap = logprob_gap(values, learner.values)
        tolerated = tolerated_gap(learner.precision, logprob_gap(learner.rounded, learner.values))
        if gap > tolerated:
            raise ModelError(
                f"{generator} and the policy learner compute different models from {self._model!r}: their "
                f"log-probabilities of the same tokens differ by {gap:.3g} nats, and rounding explains "
                f"{tolerated:.3g}. The learner computes what transformers does, so vLLM reads the model otherwise, "
                "usually by an entry of config.json that only one of the two reads: compare config.json with that of "
                "the original model, and use `rlhf-ray check-model` to try changes")
        return gap

    async def _compare_long_row(self, rank: int, row: GivenTokens) -> float:
        """Compare tokens that a generator samples after a long prompt; errors as `_checked`."""
        prompts = Prompts(row.offsets, row.tokens, [""], [{}], np.arange(1))
        sampling = SamplingConfig(max_tokens=SAMPLED)
        rollout = await self._dispatcher.group.call(
            rank, Generator.generate, prompts, [SampleKey(0, 0, 0)], self._seed, sampling).value()
        answer = await self._answer(0, GivenTokens(rollout.offsets, rollout.tokens, rollout.response_mask))
        return self._checked(f"generator/{rank}", rollout.logprobs[rollout.response_mask], answer.logprobs)

    def begin(self, version: int, ranks: Iterable[int] | None = None) -> None:
        """Start the comparison after a publication. Call nothing that changes the learner's weights before
        `mismatch` has returned.

        Args:
            ranks: the generators to compare; the next one if None.
        """
        before = self._learned()
        self._cancel()
        self._learner = _started(self._answer(version, self._rows))
        self._under_way = _started(
            self._compare(self._next() if ranks is None else list(ranks), self._learner, before))

    async def mismatch(self) -> GeneratorMismatch | None:
        """Wait for the comparison under way, if there is one; returns its error, which is returned once.

        Raises:
            WorkerLost: a learner was lost.
        """
        if self._under_way is None:
            return None
        try:
            return (await self._result()).mismatch()
        except GeneratorMismatch as error:
            return error

    async def check(self, rank: int) -> None:
        """Compare a generator that has just got the newest version.

        Raises:
            GeneratorMismatch: it computes with other weights.
            WorkerLost: it was lost, or a learner was.
        """
        if self._learner is None:
            return
        expected = await asyncio.shield(self._learner)
        gap = await self._answered_gap(self._call(rank), expected)
        if error := self._comparison(expected, {rank: gap}, None).mismatch():
            raise error

    def forget(self) -> None:
        """End the comparison under way, because the learners are about to be replaced."""
        self._cancel()
        self._learner = None

    def metrics(self) -> dict[str, float]:
        """Of the last comparison that was waited for."""
        last = self._last
        if last is None:
            return {}
        found = {"gap": last.gap, "bound": last.bound, "seconds": last.seconds}
        if last.moved is not None:
            found["moved"] = last.moved
        return {f"weights/canary_{name}": value for name, value in found.items()}

    def _next(self) -> list[int]:
        """The generator whose turn it is, of those that are available."""
        up = sorted(self._dispatcher.scheduler.up)
        self._turn += 1
        return [up[self._turn % len(up)]] if up else []

    async def _result(self) -> Comparison:
        """The comparison under way, which is over then."""
        task, self._under_way = self._under_way, None
        assert task is not None
        self._last = await task
        return self._last

    async def _answer(self, version: int, rows: GivenTokens) -> LearnerAnswer:
        calls = self._roles.policy.call_all(PolicyLearner.given_logprobs, rows)
        seconds = await asyncio.gather(*(call.done() for call in calls))
        answer = await calls[0].value()
        assert answer is not None  # the first rank's
        return LearnerAnswer(version, answer, max(seconds))

    async def _compare(self, ranks: list[int], learner: asyncio.Task[LearnerAnswer], before: LearnerAnswer | None
                       ) -> Comparison:
        calls = [self._call(rank) for rank in ranks]
        expected = await asyncio.shield(learner)
        gaps = await asyncio.gather(*(self._gap(call, expected) for call in calls))
        known = {rank: gap for rank, gap in zip(ranks, gaps, strict=True) if gap is not None}
        return self._comparison(expected, known, before)

    def _comparison(self, expected: LearnerAnswer, gaps: dict[int, float], before: LearnerAnswer | None
                    ) -> Comparison:
        learner = expected.logprobs
        noise = typical_gap(learner.rounded, learner.values)
        bound = tolerated_later(learner.precision, noise, self._first_gap, self._first_noise)
        moved = None if before is None else typical_gap(learner.values, before.logprobs.values)
        return Comparison(expected.version, gaps, bound, moved, expected.seconds)

    async def _gap(self, call: Call, expected: LearnerAnswer) -> float | None:
        """A generator's gap; None if it was lost: the one in its place is compared when it has the weights."""
        try:
            return await self._answered_gap(call, expected)
        except WorkerLost as error:
            if self._dispatcher.lost(error) is not Decision.RETRY:
                raise
            return None

    async def _answered_gap(self, call: Call, expected: LearnerAnswer) -> float:
        """A generator's gap.

        Raises:
            GeneratorMismatch: it answered with another version.
            WorkerLost: it was lost.
        """
        await finished(call, PHASE, self._roles.clock)
        values, version = await call.value()
        if version != expected.version:
            raise GeneratorMismatch(f"{call.worker} computes with version {version} of the weights, and it confirmed "
                                    f"version {expected.version}")
        return typical_gap(values, expected.logprobs.values)

    def _call(self, rank: int) -> Call:
        return self._dispatcher.group.call(rank, Generator.given_logprobs, self._rows)

    def _learned(self) -> LearnerAnswer | None:
        """The learner's log-probabilities at the newest version, if it has answered."""
        task = self._learner
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    def _cancel(self) -> None:
        """The learner's answer is left to end by itself, since a generator that catches up may wait for it."""
        if self._under_way is not None:
            self._under_way.cancel()
        self._under_way = None


def _started(work: Any) -> asyncio.Task[Any]:
    """A task whose error is not reported as unnoticed if the run ends before anybody waits for it."""
    task = asyncio.create_task(work, name=PHASE)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
