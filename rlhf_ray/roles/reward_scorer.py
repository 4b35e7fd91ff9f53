"""The reward scorer: the weighted sum of all reward sources for each rollout."""

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, cast

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import RewardConfig
from rlhf_ray.errors import SampleError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts, RewardScores, Rollout
from rlhf_ray.rewards.failure_isolation import score_or_name_failed
from rlhf_ray.rewards.local_model import PROBED
from rlhf_ray.rewards.protocol import RewardRequest, requests_of
from rlhf_ray.rewards.sources import make_sources


class RewardScorer:
    """Scores rollouts with all reward sources, several at a time. A missing score is an error, never a zero."""

    def __init__(self, rewards: Mapping[str, RewardConfig], policy: ModelConfig, micro_batch_tokens: int,
                 on_failure: Literal["fail", "quarantine"] = "fail", longest: int = PROBED,
                 judge: Mapping[str, RewardConfig] | None = None) -> None:
        """
        Args:
            policy: the model whose tokenizer decodes rollouts (rows of up to `longest` tokens).
            on_failure: as in `RewardScorerConfig`.
            judge: components of the independent judge.
        """
        self._policy, self._names_samples = policy, on_failure == "quarantine"
        self._sources = make_sources(rewards, policy, micro_batch_tokens, longest)
        self._judge = make_sources(judge, policy, micro_batch_tokens, longest) if judge else None

    async def start(self) -> dict[str, float]:
        """Start all sources. Raises ModelError or RewardError if one cannot work."""
        began = time.perf_counter()
        self._tokenizer = load_tokenizer(self._policy)
        numbers = await self._sources.start()
        if self._judge:
            await self._judge.start()
        return {"pid": os.getpid(), "seconds": time.perf_counter() - began, **numbers}

    async def score(self, rollout: Rollout, prompts: Prompts) -> RewardScores:
        """One score per sample, and the judge's.

        Args:
            prompts: the prompts of the rollout's rows.

        Raises:
            UnscoredSamples: some samples have no score, with `on_failure="quarantine"`.
            RewardError: a source failed or returned a non-finite number; names the samples.
        """
        requests = requests_of(rollout, prompts, self._tokenizer)
        rewards = await self._rewards(requests)
        if self._judge is None:
            return rewards
        return replace(rewards, gold=(await self._judge.score(requests)).scores)

    async def _rewards(self, requests: list[RewardRequest]) -> RewardScores:
        if self._names_samples:
            return await score_or_name_failed(self._sources.score, requests)
        try:
            return await self._sources.score(requests)
        except SampleError as error:
            raise SampleError(f"{str(error).rstrip('.')}. Or drop such prompts, within a budget, by setting "
                              "reward.on_failure=quarantine") from error

    async def score_each(self, *records: Rollout | Prompts) -> list[RewardScores]:
        """As `score`, for several rollouts concurrently: `records` are all rollouts, then the prompts of each."""
        half = len(records) // 2
        pairs = cast(Iterable[tuple[Rollout, Prompts]], zip(records[:half], records[half:], strict=True))
        return list(await asyncio.gather(*(self.score(rollout, prompts) for rollout, prompts in pairs)))

    async def stop(self) -> None:
        """Stop processes and close connections."""
        await self._sources.stop()
        if self._judge:
            await self._judge.stop()
