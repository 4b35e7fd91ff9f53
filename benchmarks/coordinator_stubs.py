"""Stand-ins for all roles of a PPO run: they wait for a random time and answer with records of the usual sizes.

The one place of the project where engines are made up: what is measured with them is the coordinator alone.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp
from random import Random
from typing import Any

import numpy as np

from rlhf_ray.algorithms.logprob_gap import BINS
from rlhf_ray.records import (
    Experience,
    ExperienceSummary,
    Prompts,
    PublicationSize,
    RewardScores,
    Rollout,
    SampleKey,
    TokenScores,
    UpdateStats,
    WeightsConfirmed,
    WeightsPlan,
    offsets_of,
)
from rlhf_ray.roles.generator import GeneratorActivity
from rlhf_ray.roles.learner_state import SaveProgress

CHUNK = 16
"""Samples of a rollout record, the default of `generator.chunk`."""
PROMPT, RESPONSE = 64, 256
"""Tokens of every prompt and of every response."""
GENERATE_S, SCORE_S, UPDATE_S, CONTROL_S = 4.8, 0.05, 0.3, 0.02
"""Mean latencies: a chunk of rollouts on one generator (850 tokens/s), a forward pass over a chunk, an update, and
everything else that a worker is asked. Stand-ins and Ray need a core too: two cores hold 256 generators no faster."""
SPREAD, LONGEST = 0.6, 3.0
"""Sigma of the logarithm, and the longest latency as a multiple of the mean: the length of a response is bounded."""


def draw(random: Random, mean: float) -> float:
    """Seconds from a log-normal distribution of that mean, cut off at `LONGEST` times it."""
    return min(mean * exp(random.gauss(-SPREAD**2 / 2, SPREAD)), LONGEST * mean)


class StubRoles:
    """Many workers of every role in one process; each method takes the rank first.

    A generator makes one chunk at a time, in the order of calling. All other workers stand for as many as are needed
    and answer any number of calls side by side.
    """

    def __init__(self, seed: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is that of the coordinator, by which work is noted."""
        self._random, self._clock = Random(seed), clock
        self._generators: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._versions: dict[int, int] = defaultdict(int)
        self._generated: list[tuple[float, float]] = []
        self._rollout = _rollout()
        self._per_token = TokenScores(self._rollout.offsets, np.zeros(len(self._rollout.tokens), np.float32))

    async def answer(self, rank: int, method: str, *args: Any, **named: Any) -> Any:
        """Any of the methods below, by its name."""
        return await getattr(self, method)(rank, *args, **named)

    async def start(self) -> None:
        """Nothing is loaded."""

    async def rows(self, rank: int, numbers: list[int], table: str) -> Prompts:
        """As many prompts as are asked for."""
        await self._wait(CONTROL_S)
        return _prompts(len(numbers))

    async def generate(self, rank: int, prompts: Prompts, keys: list[SampleKey], seed: int, sampling: Any) -> Rollout:
        """A chunk, made by the weights that the rank holds when it begins."""
        async with self._generators[rank]:
            seconds, version = draw(self._random, GENERATE_S), self._versions[rank]
            self._generated.append((self._clock(), seconds))
            await asyncio.sleep(seconds)
        mask = self._rollout.response_mask
        return replace(self._rollout, keys=keys, versions=np.where(mask, version, -1).astype(np.int32))

    async def logprobs(self, rank: int, *passed: Rollout, rollouts: Sequence[Rollout] = ()) -> TokenScores:
        """A number a token, of the policy or the reference; a forward pass for each rollout. The reference gets its
        rollouts by name."""
        rollouts = passed or rollouts
        await self._wait(SCORE_S * len(rollouts))
        return self._per_token if len(rollouts) == 1 else TokenScores.concat([self._per_token] * len(rollouts))

    values = logprobs

    async def score_each(self, rank: int, rollouts: list[Rollout], prompts: list[Prompts]) -> list[RewardScores]:
        """A score a sample; a forward pass for each rollout."""
        await self._wait(SCORE_S * len(rollouts))
        scores = [np.ones(len(rollout), np.float32) for rollout in rollouts]
        return [RewardScores(ones, {"main": ones}, {"main": 0}) for ones in scores]

    async def assemble(
        self, rank: int, terms: Any, rollouts: list[Rollout], **columns: Any
    ) -> tuple[Experience | list[ExperienceSummary], ...]:
        """Experience, and the small numbers about it."""
        await self._wait(CONTROL_S * len(rollouts))
        made = [self._assembled(rollout) for rollout in rollouts]
        return (*(experience for experience, _ in made), [summary for _, summary in made])

    def _assembled(self, rollout: Rollout) -> tuple[Experience, ExperienceSummary]:
        column, rows = self._per_token.values, len(rollout)
        experience = Experience(
            offsets=rollout.offsets, tokens=rollout.tokens, response_mask=rollout.response_mask,
            behaviour_logprobs=rollout.logprobs, old_logprobs=column, reference_logprobs=column, values=column,
            advantages=column, returns=column, keys=rollout.keys)
        ones = np.ones(rows, np.float32)
        return experience, ExperienceSummary(
            scores=ones, kl=ones, response_lengths=np.full(rows, RESPONSE, np.int32),
            finished=np.ones(rows, bool), min_version=int(rollout.versions[-1]), nbytes=experience.nbytes,
            tokens=len(rollout.tokens), behaviour_gap=0.0, gap_histogram=np.ones(BINS, np.float32),
            gold=None, components={"main": ones}, failures={"main": 0})

    async def save_samples(self, rank: int, *arguments: Any, **named: Any) -> tuple[int, float]:
        """The samples of a step are on disk."""
        await self._wait(CONTROL_S)
        return 0, CONTROL_S

    async def update(self, rank: int, step: int, *rest: Any) -> UpdateStats:
        """An update of a learner."""
        await self._wait(UPDATE_S)
        return UpdateStats(step, 1, 0, UPDATE_S, 1, {"loss": 0.0, "grad_norm": 1.0, "learning_rate": 1e-6})

    async def fused_groups(self, rank: int) -> list[list[str]]:
        """No weights share a layer."""
        return []

    async def plan_weights(self, rank: int, bucket_bytes: int, together: list[list[str]]) -> WeightsPlan:
        """Weights travel in one bucket."""
        return WeightsPlan(PublicationSize(1, 0), PublicationSize(1, 0))

    async def weight_bucket(self, rank: int, version: int, index: int, whole: bool) -> bytes:
        """The bucket."""
        await self._wait(CONTROL_S)
        return b""

    async def begin_weights(self, rank: int, publication: int, version: int, buckets: int, resend: bool) -> None:
        """A publication begins."""

    async def load_weights(self, rank: int, bucket: bytes, publication: int) -> None:
        """A bucket arrives at a generator."""
        await self._wait(CONTROL_S)

    async def finish_weights(self, rank: int, version: int) -> WeightsConfirmed:
        """The generator holds the version now."""
        self._versions[rank] = version
        return WeightsConfirmed(version, 0.0)

    async def activity(self, rank: int) -> GeneratorActivity:
        """A sign of life."""
        return GeneratorActivity(1, 0.0, int(1000 * self._clock()))

    async def begin_save(self, rank: int, directory: str) -> None:
        """Nothing of a learner is kept."""

    async def save_progress(self, rank: int) -> SaveProgress:
        """It is on disk."""
        return SaveProgress(True, (0, 0), "")

    async def save(self, rank: int, *args: Any) -> None:
        """The end of the run."""

    async def generated(self, rank: int) -> list[tuple[float, float]]:
        """(start, seconds) of each chunk that was generated."""
        return self._generated

    async def _wait(self, mean: float) -> None:
        await asyncio.sleep(draw(self._random, mean))


def _rollout() -> Rollout:
    mask = np.tile(np.arange(PROMPT + RESPONSE) >= PROMPT, CHUNK)
    tokens = len(mask)
    return Rollout(
        offsets=offsets_of([PROMPT + RESPONSE] * CHUNK), tokens=np.zeros(tokens, np.int32), response_mask=mask,
        logprobs=np.zeros(tokens, np.float32), versions=np.zeros(tokens, np.int32), keys=[],
        seeds=np.zeros(CHUNK, np.int64), finish_reasons=["stop"] * CHUNK)


def _prompts(count: int) -> Prompts:
    return Prompts(
        offsets=offsets_of([PROMPT] * count), tokens=np.zeros(PROMPT * count, np.int32),
        texts=["p" * 4 * PROMPT] * count, metadata=[{}] * count, rows=np.arange(count))
