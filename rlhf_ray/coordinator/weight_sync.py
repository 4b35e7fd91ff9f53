"""New policy weights to every generator: gathered, sent and loaded bucket by bucket, confirmed by each."""

import asyncio
import time
from collections import deque

from rlhf_ray.cluster.calls import Call
from rlhf_ray.config.generation import WeightsConfig
from rlhf_ray.coordinator.team import Team
from rlhf_ray.errors import WeightsError

AHEAD = 2
"""Buckets on their way at the same time: one is gathered while one is loaded, and the store holds no whole model."""


class WeightSync:
    """Publishes versions. A generator that did not confirm a version does not generate with it."""

    def __init__(self, config: WeightsConfig, team: Team) -> None:
        self.config, self.team = config, team
        self._buckets: int | None = None

    async def publish(self, version: int) -> float:
        """Send the policy's present weights as `version`; returns the seconds it took.

        Raises:
            WeightsError: a generator confirmed another version, or refused a bucket.
        """
        began = time.perf_counter()
        if self._buckets is None:
            self._buckets = (await self.team.policy.values("weight_buckets", self.config.bucket_mb * 2**20))[0]
        await self.team.generators.values("begin_weights", version, self._buckets)
        under_way: deque[list[Call]] = deque()
        for index in range(self._buckets):
            bucket = self.team.policy.call_all("weight_bucket", version, index)[0]
            under_way.append(self.team.generators.call_all("load_weights", bucket.ref))
            if len(under_way) == AHEAD:
                await self._loaded(under_way.popleft())
        while under_way:
            await self._loaded(under_way.popleft())
        confirmed = await self.team.generators.values("finish_weights", version)
        if set(confirmed) != {version}:
            raise WeightsError(f"published version {version}, but the generators confirmed {confirmed}")
        return time.perf_counter() - began

    async def _loaded(self, calls: list[Call]) -> None:
        await asyncio.gather(*(self.team.done(call, "publish") for call in calls))
