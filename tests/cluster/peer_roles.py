"""Roles for tests of calls between workers: a runner of short episodes, and generators whose answers can be held back
and marked. Workers import this module quickly: vLLM is imported by a real generator when it starts."""

import asyncio
from dataclasses import replace

import numpy as np

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.generator import Generator, GeneratorActivity
from rlhf_ray.workers.calls import Deadline
from rlhf_ray.workers.peers import PeerGroup

SAMPLING = SamplingConfig(max_tokens=8)
Turn = tuple[list[int], list[int]]
"""Tokens, and the versions that sampled them."""


class Runner:
    """Plays episodes of several turns, each with a generator."""

    def __init__(self, generators: PeerGroup[Generator]) -> None:
        self._generators = generators

    async def start(self) -> None:
        """Nothing to load."""

    async def play(self, episodes: list[int], turns: int, attempt: int) -> dict[int, list[Turn]]:
        """The turns of each episode. Calls of one attempt stick to a generator."""
        played = await asyncio.gather(*(self._play_one(episode, turns, attempt) for episode in episodes))
        return dict(zip(episodes, played, strict=True))

    async def _play_one(self, episode: int, turns: int, attempt: int) -> list[Turn]:
        prompt = [5 + episode, 7]
        completions = []
        for turn in range(turns):
            request = SampleRequest(prompt, SAMPLING, SAMPLING.max_tokens, 100 * episode + turn, [1])
            [completion] = await self._generators.call(
                Generator.sample, [request], sticky=(attempt, episode), deadline=Deadline(60.0))
            prompt = [*prompt, *completion.tokens.tolist()]
            completions.append((completion.tokens.tolist(), completion.versions.tolist()))
        return completions


class HeldAnswers:
    """Answers of `sample` that are held back between `hold` and `release`, and then carry `mark` as their version."""

    def __init__(self, *args, **named) -> None:
        super().__init__(*args, **named)
        self._released = asyncio.Event()
        self._released.set()
        self._mark = 0
        self._counts = {"waiting": 0, "answered": 0}

    def hold(self) -> None:
        """Answer no call from now on."""
        self._released.clear()

    def release(self, mark: int) -> None:
        """Answer all calls."""
        self._mark = mark
        self._released.set()

    def counts(self) -> dict[str, int]:
        """Calls of `sample` that wait for `release`, and calls that were answered."""
        return dict(self._counts)

    async def _held(self, completions: list[Completion]) -> list[Completion]:
        self._counts["waiting"] += 1
        try:
            await self._released.wait()
            self._counts["answered"] += 1
        finally:
            self._counts["waiting"] -= 1
        return [replace(c, versions=np.full_like(c.versions, self._mark)) for c in completions]


class RealGenerator(HeldAnswers, Generator):
    """vLLM."""

    async def sample(self, requests: list[SampleRequest]) -> list[Completion]:
        """See `Generator.sample`."""
        return await self._held(await super().sample(requests))


class LightGenerator(HeldAnswers):
    """Answers without a model: tokens follow from the request's seed and prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._open = 0
        self._made = 0

    async def start(self) -> None:
        """Nothing to load."""

    async def sample(self, requests: list[SampleRequest]) -> list[Completion]:
        """As `Generator.sample`."""
        self._open += len(requests)
        try:
            await asyncio.sleep(0.02)
            return await self._held([self._completion(request) for request in requests])
        finally:
            self._open -= len(requests)

    def activity(self) -> GeneratorActivity:
        """As `Generator.activity`."""
        return GeneratorActivity(self._open, 0.0, self._made)

    def _completion(self, request: SampleRequest) -> Completion:
        tokens = np.random.default_rng([request.seed, *request.prompt]).integers(2, 500, request.max_tokens)
        self._made += len(tokens)
        zeros = np.zeros(len(tokens))
        return Completion(tokens.astype(np.int32), zeros.astype(np.float32), zeros.astype(np.int32), "length")
