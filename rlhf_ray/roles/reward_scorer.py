"""The reward scorer: the weighted sum of all reward sources for each rollout."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from rlhf_ray.config.derived import Derived, judge_rewards
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import RewardConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import RewardError, SampleError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.shard import WHOLE, Shard
from rlhf_ray.records import Prompts, RewardScores, Rollout
from rlhf_ray.rewards.failure_isolation import score_or_name_failed
from rlhf_ray.rewards.local_model import PROBED
from rlhf_ray.rewards.protocol import RewardRequest, all_ended, requests_of
from rlhf_ray.rewards.sources import WeightedSum, make_sources


class RewardScorer:
    """Scores rollouts with all reward sources, several at a time. A missing score is an error, never a zero."""

    def __init__(self, rewards: Mapping[str, RewardConfig], policy: ModelConfig, micro_batch_tokens: int,
                 on_failure: Literal["fail", "quarantine"] = "fail", longest: int = PROBED,
                 judge: Mapping[str, RewardConfig] | None = None, shard: Shard = WHOLE) -> None:
        """
        Args:
            policy: the model whose tokenizer decodes rollouts (rows of up to `longest` tokens).
            on_failure: as in `RewardScorerConfig`.
            judge: components of the independent judge.
            shard: the part of every reward model in this process. The ranks make every call together, one at a time,
                and the first one's answer counts: it alone has the sources without a model.
        """
        self._policy = policy
        self._names_samples = on_failure == "quarantine"
        self._shard = shard
        self._sources = make_sources(rewards, policy, micro_batch_tokens, longest, shard)
        self._judge = make_sources(judge, policy, micro_batch_tokens, longest, shard) if judge else None
        self._turn = asyncio.Lock()

    @staticmethod
    def arguments(config: PPOConfig, derived: Derived, rank: int) -> Mapping[str, Any]:
        """Arguments of a rank in a run."""
        return {
            "rewards": config.rewards,
            "policy": config.model,
            "micro_batch_tokens": config.reward.micro_batch_tokens,
            "on_failure": config.reward.on_failure,
            "longest": derived.longest_sample,
            "judge": judge_rewards(config),
            "shard": Shard.of_worker(rank, config.reward.shards),
        }

    async def start(self, address: str = "", timeout_s: float = 0.0) -> dict[str, float]:
        """Start all sources; returns what `WeightedSum.start` returns.

        Args:
            address: where the ranks of sharded models join.
            timeout_s: longest wait of any of their collective calls for the other ranks, in seconds.

        Raises:
            ModelError, RewardError: a source cannot work.
        """
        if not self._shard.is_whole:
            from rlhf_ray.engine.distributed import join

            await asyncio.to_thread(join, address, self._shard.rank, self._shard.world, timeout_s)
        self._tokenizer = load_tokenizer(self._policy)
        numbers = await self._sources.start()
        if self._judge:
            await self._judge.start()
        return numbers

    async def score(self, rollout: Rollout, prompts: Prompts) -> RewardScores:
        """One score per sample, and the judge's.

        Args:
            prompts: the prompts of the rollout's rows.

        Raises:
            UnscoredSamples: some samples have no score, with `on_failure="quarantine"`.
            RewardError: a source failed or returned a non-finite number; names the samples.
        """
        requests = requests_of(rollout, prompts, self._tokenizer)
        rewards = await self._all_scores(self._sources, requests)
        if self._judge is None:
            return rewards
        return replace(rewards, gold=(await self._all_scores(self._judge, requests)).scores)

    async def _all_scores(self, sources: WeightedSum, requests: list[RewardRequest]) -> RewardScores:
        if self._names_samples:
            return await score_or_name_failed(partial(self._score, sources), requests)
        try:
            return await self._score(sources, requests)
        except SampleError as error:
            raise SampleError(f"{str(error).rstrip('.')}. Or drop such prompts, within a budget, by setting "
                              "reward.on_failure=quarantine") from error

    async def _score(self, sources: WeightedSum, requests: Sequence[RewardRequest]) -> RewardScores:
        """The sources' scores. If a source fails on one rank, all ranks raise its error, so that they go on alike."""
        if self._shard.is_whole:
            return await sources.score(requests)
        from rlhf_ray.engine.distributed import gather_objects

        scores: RewardScores | None = None
        own_error: RewardError | None = None
        async with self._turn:
            try:
                scores = await sources.score(requests)
            except RewardError as error:
                own_error = error
            failed = [each for each in await asyncio.to_thread(gather_objects, own_error) if each is not None]
        if failed:
            raise failed[0]
        assert scores is not None
        return scores

    async def score_each(self, rollouts: Sequence[Rollout], prompts: Sequence[Prompts]) -> list[RewardScores]:
        """As `score`, for several rollouts concurrently; each has prompts of its own."""
        return await all_ended(*(self.score(*pair) for pair in zip(rollouts, prompts, strict=True)))

    async def printed(self) -> list[str]:
        """The lines that reward functions have printed since the last call."""
        return [*self._sources.printed(), *(self._judge.printed() if self._judge else [])]

    async def stop(self) -> None:
        """Stop processes and close connections."""
        await self._sources.stop()
        if self._judge:
            await self._judge.stop()
