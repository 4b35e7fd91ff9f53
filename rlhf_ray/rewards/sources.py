"""Creation of reward sources from the configuration, and their weighted sum."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import (
    LOCAL_MODELS,
    CodeReward,
    EnvironmentReward,
    FunctionReward,
    HTTPReward,
    ModelReward,
    ProcessReward,
    RewardConfig,
    VaderReward,
    VerifiableReward,
)
from rlhf_ray.models.shard import WHOLE, Shard
from rlhf_ray.records import RewardScores
from rlhf_ray.rewards.code_source import CodeSource
from rlhf_ray.rewards.environment_source import EnvironmentSource
from rlhf_ray.rewards.function_source import FunctionSource
from rlhf_ray.rewards.http.source import HTTPSource
from rlhf_ray.rewards.local_model import PROBED, ModelSource
from rlhf_ray.rewards.process_reward_model import ProcessModelSource
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, RewardSource, all_ended, checked, finite_scores
from rlhf_ray.rewards.rule_sources import rule_source
from rlhf_ray.rewards.sentiment import VaderSource

MICRO_BATCH_TOKENS = 8192
"""Most tokens of one forward pass of a scorer's models, where the run does not say."""


def make_sources(
    rewards: Mapping[str, RewardConfig], policy: ModelConfig, micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    longest: int = PROBED, shard: Shard = WHOLE,
) -> WeightedSum:
    """All components of a run's reward, not started yet.

    Args:
        shard: the part of every local model in this process. Only the first rank has components without one.
    """
    turn = None if shard.is_whole else asyncio.Lock()
    return WeightedSum({
        name: (config.weight, make_source(name, config, policy, micro_batch_tokens, longest, shard, turn))
        for name, config in rewards.items() if shard.rank == 0 or isinstance(config, LOCAL_MODELS)})


def make_source(
    name: str, config: RewardConfig, policy: ModelConfig, micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    longest: int = PROBED, shard: Shard = WHOLE, turn: asyncio.Lock | None = None,
) -> RewardSource:
    """One component, not started yet.

    Args:
        name: of the component, for messages.
        policy: whose tokenizer made the token ids of requests.
        micro_batch_tokens: most tokens of one forward pass, for local models.
        longest: most tokens of the policy's rows.
        shard, turn: of local models, see `LocalSource`.
    """
    match config:
        case ModelReward():
            return ModelSource(name, config, policy, micro_batch_tokens, longest, shard, turn)
        case FunctionReward():
            return FunctionSource(name, config)
        case CodeReward():
            return CodeSource(name, config)
        case VerifiableReward():
            return rule_source(name, config)
        case ProcessReward():
            return ProcessModelSource(name, config, policy, micro_batch_tokens, longest, shard, turn)
        case VaderReward():
            return VaderSource()
        case EnvironmentReward():
            return EnvironmentSource()
        case HTTPReward():
            return HTTPSource(name, config)


class WeightedSum:
    """Named sources, each with its weight."""

    def __init__(self, sources: Mapping[str, tuple[float, RewardSource]]) -> None:
        self._sources = dict(sources)

    async def start(self) -> dict[str, float]:
        """Start all sources concurrently; returns the largest of each of their measurements. The first failure is
        raised after all have ended."""
        measurements = await all_ended(*(source.start() for _, source in self._sources.values()))
        largest: dict[str, float] = {}
        for name, number in ((name, number) for numbers in measurements for name, number in (numbers or {}).items()):
            largest[name] = max(number, largest.get(name, number))
        return largest

    async def score(self, requests: Sequence[RewardRequest]) -> RewardScores:
        """The weighted sum and its components.

        Raises:
            RewardError: a source failed, or violated the protocol, or the sum is beyond float32. The other
                sources' scores are not used.
        """
        answers: list[RewardAnswer] = await all_ended(*(source.score(requests) for _, source in self._sources.values()))
        named = {name: checked(a, requests, name) for name, a in zip(self._sources, answers, strict=True)}
        weights = {name: weight for name, (weight, _) in self._sources.items()}
        dense = [weights[name] * a.token_rewards.astype(np.float64) for name, a in named.items()
                 if a.token_rewards is not None]
        total = sum((weights[name] * a.scores.astype(np.float64) for name, a in named.items()),
                    np.zeros(len(requests)))
        return RewardScores(
            scores=finite_scores(total, requests, "the weighted sum of rewards", "lower their weights"),
            components={name: a.scores for name, a in named.items()},
            failures=_failures(named),
            token_rewards=np.sum(dense, axis=0).astype(np.float32) if dense else None,
        )

    def printed(self) -> list[str]:
        """The lines that functions have printed since the last call, each with its component's name."""
        return [line for _, source in self._sources.values() if isinstance(source, FunctionSource)
                for line in source.printed()]

    async def stop(self) -> None:
        """Stop all sources, in any state."""
        await asyncio.gather(*(source.stop() for _, source in self._sources.values()), return_exceptions=True)


def _failures(answers: Mapping[str, RewardAnswer]) -> dict[str, int]:
    """Component -> number of `RewardAnswer.failures`; component/kind -> number of failures of that kind."""
    kinds = {f"{name}/{kind}": count for name, a in answers.items() for kind, count in a.failure_kinds.items()}
    return {name: a.failures for name, a in answers.items()} | kinds
