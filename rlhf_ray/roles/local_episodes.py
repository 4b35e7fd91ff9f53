"""Episodes of one model in this process, for `rlhf-ray generate` and `rlhf-ray compare`: the runner, the generator and
the scorer of a run, called directly."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import EnvironmentReward
from rlhf_ray.records import SampleKey
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.local_generator import LocalGenerator
from rlhf_ray.roles.prompt_input import PromptInput
from rlhf_ray.roles.reward_scorer import RewardScorer

SEQUENCES = 8
"""Turns sampled at the same time at most: each may have the tokens of a whole episode in the KV cache."""
SOLVED_AT = EnvironmentReward(type="environment").solved_at
"""Reward from which on an episode counts as solved."""


class LocalEpisodes:
    """Plays episodes with one model and scores them by the rewards of their environment.

    Example:
        episodes = LocalEpisodes(model, {"tools": EnvironmentConfig(path="my_env.py:Calculator")}, sampling, seed=0)
        await episodes.start(questions)
        rows = await episodes.play(questions)
        rows[0]["cause"], rows[0]["score"]  # ("completed", 1.0)
        await episodes.stop()
    """

    def __init__(self, model: ModelConfig, environments: Mapping[str, EnvironmentConfig], sampling: SamplingConfig,
                 seed: int, column: str = "environment") -> None:
        """
        Args:
            sampling: of a turn.
            seed: of the run: the seeds of episodes and environments are derived from it.
            column: of the rows that names the environment, if there are several.
        """
        self._model = model
        self._environments = dict(environments)
        self._sampling = sampling
        self._seed = seed
        self._column = column

    async def start(self, questions: Sequence[PromptInput]) -> None:
        """Load the model and the environments; raises as `LocalGenerator.start` and `EpisodeRunner.start`."""
        longest = max(each.max_tokens for each in self._environments.values())
        self._generator = LocalGenerator(self._model, self._sampling, self._seed, True, SEQUENCES)
        await self._generator.start(questions, prompt_tokens=max(1, longest - self._sampling.max_tokens))
        context = self._generator.context
        # An episode that the model's context cannot hold ends where the context does.
        environments = {name: each.model_copy(update={"max_tokens": min(each.max_tokens, context)})
                        for name, each in self._environments.items()}
        self._runner = EpisodeRunner(environments, self._model, self._sampling,
                                     _Direct(self._generator.generator), self._column, least_scored=0)
        self._scorer = RewardScorer({"environment": EnvironmentReward(type="environment")}, self._model, context)
        self._assembler = Assembler(AlgorithmConfig(), self._model, context)
        self._assembler.start()
        await asyncio.gather(self._runner.start(), self._scorer.start())

    async def play(self, questions: Sequence[PromptInput], samples: int = 1) -> list[dict[str, Any]]:
        """Episodes in the order of their prompts, those of one prompt together, each as a row with the columns of
        samples/ (`observability.sample_files`). The score of an episode that failed is None."""
        prompts = self._generator.prompts_of(questions)
        keys = [SampleKey(0, row, sample) for row in range(len(questions)) for sample in range(samples)]
        rollout = await self._runner.play(prompts, keys, self._seed, held_out=True)
        rewards = await self._scorer.score(rollout, prompts)
        return self._assembler.evaluated_samples(prompts, [rollout], [rewards])

    def printed(self) -> list[str]:
        """The lines that environments have printed since the last call."""
        return self._runner.printed()

    async def stop(self) -> None:
        """End the environments, and release the model."""
        parts = [getattr(self, name) for name in ("_runner", "_scorer", "_generator") if hasattr(self, name)]
        for part in parts:
            await part.stop()


class _Direct:
    """The one generator, called in this process (`episode_runner.Generators`)."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def call(self, method: Any, *args: Any, work: int = 1, sticky: Hashable = None, **named: Any) -> Any:
        """As `Generators.call`."""
        return await method(self._generator, *args, **named)


def episode_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers of some episodes: the share that is solved, of all; the mean reward of those that have one; turns; and
    how many failed, which have none."""
    scores = [row["score"] for row in rows if row["score"] is not None and not math.isnan(row["score"])]
    return {
        "solved": sum(score >= SOLVED_AT for score in scores) / len(rows),
        "reward": fmean(scores) if scores else math.nan,
        "turns": fmean(len(row["turns"]) for row in rows),
        "failed": float(len(rows) - len(scores)),
    }
