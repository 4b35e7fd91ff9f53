"""New policy weights to every generator: gathered, sent and loaded bucket by bucket, confirmed by each."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from rlhf_ray.cluster.calls import Call
from rlhf_ray.config.generation import WeightsConfig
from rlhf_ray.coordinator.team import Team
from rlhf_ray.errors import WeightsError
from rlhf_ray.records import PublicationSize, WeightsConfirmed, WeightsPlan

AHEAD = 3
"""Buckets on their way at the same time: while one is loaded, the next lies in the store and one more is gathered."""


@dataclass(frozen=True)
class Published:
    """What one publication took."""

    seconds: float
    pause_seconds: float
    """For how long a generator could make no token, the longest of all."""
    nbytes: int
    """Sent by the learner; each node receives them once."""


class WeightSync:
    """Publishes versions. A generator that did not confirm a version does not generate with it.

    The first publication is whole, and so is the one after a failed one. In between, tensors that training leaves as
    they are stay out; should a generator not have them (it was started anew), all is sent again.
    """

    def __init__(self, config: WeightsConfig, team: Team) -> None:
        self.config, self.team = config, team
        self._plan: WeightsPlan | None = None
        self._lasting: Any = None
        """Digests of what may stay out, in the object store; None before a whole publication was confirmed."""

    async def publish(self, version: int, resend: bool = False) -> Published:
        """Send the policy's present weights as `version`.

        Args:
            resend: as for `Receiver.begin`; with it the generators may hold any version, and all is sent.

        Raises:
            WeightsError: a generator confirmed another version, or refused a bucket.
        """
        began = time.perf_counter()
        plan = self._plan = self._plan or await self._planned()
        lasting, self._lasting = self._lasting, None
        size = await self._begin(version, plan, None if resend else lasting, resend)
        confirmed = await self._send(version, size, whole=size is plan.whole)
        if {answer.version for answer in confirmed} != {version}:
            raise WeightsError(f"published version {version}, but the generators confirmed "
                               f"{[answer.version for answer in confirmed]}")
        seconds = time.perf_counter() - began
        if plan.changing != plan.whole:
            self._lasting = lasting if size is plan.changing else self.team.policy.call(0, "lasting_weights").ref
        return Published(seconds, max(answer.pause_seconds for answer in confirmed), size.nbytes)

    async def _planned(self) -> WeightsPlan:
        together = await self.team.generators.call(0, "weights_together").value()
        plans: list[WeightsPlan] = await self.team.policy.values(
            "plan_weights", self.config.bucket_mb * 2**20, together)
        return plans[0]

    async def _begin(self, version: int, plan: WeightsPlan, lasting: Any, resend: bool) -> PublicationSize:
        """Announce the version to every generator; returns which publication they expect."""
        if lasting is not None:
            try:
                await self.team.generators.values("begin_weights", version, plan.changing.buckets, False, lasting)
            except WeightsError:
                pass  # one of them lacks what would be left out; nothing is lost but a little time
            else:
                return plan.changing
        how = (True,) if resend else ()
        await self.team.generators.values("begin_weights", version, plan.whole.buckets, *how)
        return plan.whole

    async def _send(self, version: int, size: PublicationSize, whole: bool) -> list[WeightsConfirmed]:
        under_way: deque[list[Call]] = deque()
        for index in range(size.buckets):
            bucket = self.team.policy.call_all("weight_bucket", version, index, whole)[0]
            under_way.append(self.team.generators.call_all("load_weights", bucket.ref))
            if len(under_way) == AHEAD:
                await self._loaded(under_way.popleft())
        while under_way:
            await self._loaded(under_way.popleft())
        confirmed: list[WeightsConfirmed] = await self.team.generators.values("finish_weights", version)
        return confirmed

    async def _loaded(self, calls: list[Call]) -> None:
        await asyncio.gather(*(self.team.done(call, "publish") for call in calls))
