"""The reward scorer: the weighted sum of all reward sources for each rollout."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.derived import Derived, judge_rewards
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import RewardConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import RewardError, SampleError, UnscoredSamples
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.shard import WHOLE, Shard
from rlhf_ray.records import Prompts, RewardScores, Rollout, Unscored, row_indices
from rlhf_ray.rewards.failure_isolation import score_or_name_failed
from rlhf_ray.rewards.local_model import PROBED
from rlhf_ray.rewards.protocol import RewardRequest, all_ended, requests_of, sample_names
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
        self._rewards = list(rewards)
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
            UnscoredSamples: some samples have no score, with `on_failure="quarantine"`, or are episodes that failed.
            RewardError: a source failed or returned a non-finite number; names the samples.
        """
        requests = requests_of(rollout, prompts, self._tokenizer)
        if rollout.episodes is None:
            return await self._scored(requests)
        require_outcomes(requests)
        kept = [i for i, episode in enumerate(rollout.episodes) if episode.use == "train"]
        scores = await self._scored([requests[i] for i in kept]) if kept else self._nothing()
        return of_episodes(scores, kept, rollout)

    async def _scored(self, requests: list[RewardRequest]) -> RewardScores:
        rewards = await self._all_scores(self._sources, requests)
        if self._judge is None:
            return rewards
        return replace(rewards, gold=(await self._all_scores(self._judge, requests)).scores)

    def _nothing(self) -> RewardScores:
        """The scores of no samples."""
        none = np.empty(0, np.float32)
        return RewardScores(none, dict.fromkeys(self._rewards, none), gold=None if self._judge is None else none)

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


def require_outcomes(requests: Sequence[RewardRequest]) -> None:
    """Refuse episodes that are to be quarantined: nothing can be learned of them.

    Raises:
        UnscoredSamples: there are some; it has the reason of each.
    """
    failed = [Unscored(request.key, request.prompt, request.response, request.episode.error or request.episode.cause)
              for request in requests if request.episode is not None and request.episode.use == "quarantine"]
    if failed:
        raise UnscoredSamples(f"{sample_names([sample.key for sample in failed])} failed as episodes: "
                              f"{failed[0].reason}", failed)


def of_episodes(scores: RewardScores, scored: Sequence[int], rollout: Rollout) -> RewardScores:
    """The scores of all episodes of a rollout, from those of some: 0 for one of `use` "zero", NaN for one that is
    masked.

    Args:
        scored: number of each sample in `scores`.
    """
    episodes = rollout.episodes or []

    def all_of(column: NDArray[np.float32]) -> NDArray[np.float32]:
        whole = np.array([0.0 if episode.use == "zero" else np.nan for episode in episodes], dtype=np.float32)
        whole[list(scored)] = column
        return whole

    token_rewards = None
    if scores.token_rewards is not None:
        token_rewards = np.zeros(len(rollout.tokens), dtype=np.float32)
        token_rewards[row_indices(rollout.offsets, rollout.rows_of(np.asarray(scored, dtype=np.int64)))
                      ] = scores.token_rewards
    return replace(
        scores, scores=all_of(scores.scores), token_rewards=token_rewards,
        components={name: all_of(column) for name, column in scores.components.items()},
        gold=None if scores.gold is None else all_of(scores.gold))
