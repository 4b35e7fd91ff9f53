"""Publication of policy weights to all generators: gathered, sent, loaded bucket by bucket, and confirmed."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rlhf_ray.config.generation import BUCKETS_IN_STORE, WeightsConfig
from rlhf_ray.coordinator.broadcast_group import BroadcastGroup
from rlhf_ray.coordinator.canary import Canary
from rlhf_ray.coordinator.colocation import Phases
from rlhf_ray.coordinator.direct_sync import DIRECT, DirectSync
from rlhf_ray.errors import DamagedBucket, NoWeightsPlan, RLHFError, WeightsError, WorkerError, first_line
from rlhf_ray.failpoints import reached
from rlhf_ray.records import PublicationSize, WeightsPlan
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.workers.calls import Call, Deadline
from rlhf_ray.workers.role_groups import RoleGroups

RETRY_S = 1.0
"""Between two attempts to catch up while a learner is lost."""


@dataclass(frozen=True)
class Published:
    """Time and size of one publication."""

    seconds: float
    pause_seconds: float
    """The longest time for which a generator could produce no tokens."""
    nbytes: int
    """Sent by the learner; each node receives them once."""


class WeightSync:
    """Publishes versions. A generator that did not confirm a version does not generate with it.

    The first publication is whole, and so is the one after a failed one. Other publications omit tensors that training
    does not change; if a generator lacks them (because it was restarted), all tensors are sent again.

    If a generator is lost during a publication, the publication continues with the others. The new generator catches up
    while the learner holds the weights of a version: between a publication and the next update. When learners are
    replaced, a catch-up under way ends first, and is repeated with the new learners.
    """

    def __init__(self, config: WeightsConfig, roles: RoleGroups, finish_timeout_s: float | None = None,
                 phases: Phases | None = None, canary: Canary | None = None, idle_within_s: float | None = None
                 ) -> None:
        """
        Args:
            finish_timeout_s: longest time in which a generator activates new weights, or receives a bucket from GPU to
                GPU.
            phases: GPU sharing of generators and learners, if they share GPUs.
            canary: compares generators with the learner after each publication; None compares nothing.
            idle_within_s: with `coordinator.max_staleness` 0, how long `require_idle` waits; None: responses may be in
                flight when weights are published.
        """
        self.canary = canary
        self.phases = phases
        """The loop switches to `learning`; `publish` switches to `publishing` and `generation`."""
        self.config, self.roles = config, roles
        self._idle_within_s = idle_within_s
        self.version = 0
        """The newest published version; generators load version 0 when they start."""
        self.confirmed: dict[int, int] = {}
        """Version that each generator confirmed last, by rank; no entry if it still has the weights that it loaded."""
        self._to_finish = None if finish_timeout_s is None else Deadline(
            finish_timeout_s, "cluster.heartbeat_timeout_s")
        self._dispatcher = roles.dispatcher(roles.generators)
        self._steady, self._settled = asyncio.Lock(), True
        self._catching_up: asyncio.Timeout | None = None
        """Around the catch-up under way; there is one at a time."""
        self._publication = 0
        """Number of the latest publication. It is unique, unlike a version, which repeats after a learner is lost."""
        self._direct = DirectSync(config.transport, roles, self._to_finish) if config.transport in DIRECT else None
        self._plan: WeightsPlan | None = None
        self._unchanged: Any = None
        """Reference to digests of the tensors that may be omitted; None before a whole publication was confirmed."""

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Surrounds the time in which the policy's weights are not those of `version`: from before an update (or the
        restore of a checkpoint) to the end of their publication."""
        async with self._steady:
            self._settled = False
            yield
            self._settled = True

    async def over(self) -> None:
        """Wait until a publication under way, and the update before it, is over. If a generator left during a
        broadcast, the other generators and the learner would hang."""
        async with self._steady:
            pass

    async def forget(self) -> None:
        """Discard the plan and the digests, because the learners are about to be replaced. When this returns, no
        catch-up is under way, so none of its calls reaches a new learner, which has no plan yet. No catch-up starts
        before the next publication, which must be a `resend`."""
        self._settled = False
        if self.canary is not None:
            self.canary.forget()
        if self._catching_up is not None and not self._catching_up.expired():
            self._catching_up.reschedule(0.0)
        async with self._steady:
            self._plan = self._unchanged = None
            if self._direct:
                self._direct.forget()

    async def require_idle(self) -> None:
        """With `coordinator.max_staleness` 0, have all available generators end requests that nobody waits for, and
        wait until its engine has none. Ask before an update: what is open then would see the new weights, and the
        result would depend on timing.

        Raises:
            WorkerError: requests are still open; names them.
        """
        if self._idle_within_s is None:
            return
        waits = Deadline(2 * self._idle_within_s, "cluster.heartbeat_timeout_s")
        asked = BroadcastGroup(self._dispatcher, self._dispatcher.scheduler.up, phase="end_requests")
        answers = await asked.each(asked.calls(Generator.open_requests, self._idle_within_s, deadline=waits))
        role = self._dispatcher.group.role
        still_open = [f"{role}/{rank}: {answer}" for rank, answer in zip(asked.ranks, answers, strict=True)
                      if answer]
        if still_open:
            raise WorkerError(
                f"with coordinator.max_staleness=0 no response may be in flight when weights change, but after "
                f"{self._idle_within_s:g} s (cluster.heartbeat_timeout_s) there are: {'; '.join(still_open)}. Resume "
                "the run with --resume, and report it with this message", role)

    async def publish(self, version: int, resend: bool = False) -> Published:
        """Send the policy's present weights as `version`. The caller must be inside `changing`, and have called
        `require_idle` before an update; a `resend` follows none, and calls it.

        Afterwards the canary is under way, with one generator, or with all of them after a whole publication to
        generators or by learners that may be new. Wait for it (`Canary.mismatch`) before the next update.

        Args:
            resend: as for `Receiver.begin`: generators may have any version, and learners may have been replaced.

        Raises:
            WeightsError: a generator confirmed another version, or refused a bucket.
            WorkerLost: a learner was lost.
            WorkerError: see `require_idle`.
        """
        self.version = version
        if resend:
            await self.require_idle()
            self._plan = self._unchanged = None
        first = self._plan is None
        if self.phases is not None:
            if self.phases.drops_weights:
                self._unchanged = None
            await self.phases.publishing()
        receivers = BroadcastGroup(self._dispatcher, self._dispatcher.scheduler.up)
        published = await self._publish_to(receivers, resend)
        if self.phases is not None:
            await self.phases.generation()
        if self.canary is not None:
            self.canary.begin(version, receivers.ranks if first else None)
        return published

    async def catch_up(self, rank: int, readmit: Callable[[], None]) -> str:
        """Publish the present version to a generator that has just started, then readmit it (`health_monitor.Ready`).

        Raises:
            WorkerLost: the generator was lost again.
            GeneratorMismatch: it does not compute with these weights.
        """
        self.confirmed.pop(rank, None)
        untouched = True
        while True:
            async with self._steady:
                if self._settled:
                    has_it, untouched = untouched and self.version == 0, False
                    if await self._caught_up(rank, has_it):
                        readmit()
                        return f"caught up to version {self.version}"
            await asyncio.sleep(RETRY_S)

    async def _caught_up(self, rank: int, has_it: bool) -> bool:
        """Publish to one generator, whatever version it has, unless it `has_it`, and compare it with the learner.
        Returns False if a learner is lost or replaced meanwhile; calls that wait for a generator then raise the
        learner's error."""
        alone = BroadcastGroup(self._dispatcher, [rank])
        limit = self._catching_up = asyncio.timeout(None)
        try:
            async with limit:
                if not has_it:
                    await self._publish_to(alone, resend=True)
                if self.canary is not None and not alone.losses:
                    await self.canary.check(rank)
            learners_available = True
        except TimeoutError:
            if not limit.expired():
                raise
            learners_available = False
        except WorkerError as error:
            if not self.roles.trains(error.role):
                raise
            self._dispatcher.scheduler.interrupt(error)
            learners_available = False
        except NoWeightsPlan:
            self._plan, learners_available = None, False
        finally:
            self._catching_up = None
        if alone.losses:
            raise alone.losses[-1]
        return learners_available

    async def _publish_to(self, receivers: BroadcastGroup, resend: bool) -> Published:
        began = time.perf_counter()
        plan = self._plan = self._plan or await self._planned(receivers)
        if plan is None or not receivers.ranks:
            return Published(0.0, 0.0, 0)
        unchanged, self._unchanged = self._unchanged, None
        if self._direct:
            await self._direct.connect(receivers)
        size = await self._begin(receivers, plan, unchanged, resend)
        await self._send(receivers, size, whole=size is plan.whole)
        confirmed = await receivers.each(receivers.calls(
            Generator.finish_weights, self.version, deadline=self._to_finish))
        if {answer.version for answer in confirmed} - {self.version}:
            raise WeightsError(f"published version {self.version}, but the generators confirmed "
                               f"{[answer.version for answer in confirmed]}")
        self.confirmed.update(dict.fromkeys(receivers.ranks, self.version))
        if self._direct:
            await self._direct.finished()
        seconds = time.perf_counter() - began
        if plan.changing != plan.whole:
            if size is not plan.changing:
                unchanged = self.roles.policy.call(0, PolicyLearner.unchanged_weights).ref
            self._unchanged = unchanged
        return Published(seconds, max((answer.pause_seconds for answer in confirmed), default=0.0), size.nbytes)

    async def _planned(self, receivers: BroadcastGroup) -> WeightsPlan | None:
        """The plan; None if no generator is left to return its fused groups."""
        answers = await receivers.each(receivers.calls(Generator.fused_groups))
        if not answers:
            return None
        plans = await self.roles.policy.values(PolicyLearner.plan_weights, self.config.bucket_bytes, answers[0])
        return plans[0]

    async def _begin(
        self, receivers: BroadcastGroup, plan: WeightsPlan, unchanged: Any, resend: bool
    ) -> PublicationSize:
        """Announce the version to every generator; returns the size of the publication that they expect."""
        async def missed(size: PublicationSize, *unchanged: Any) -> dict[int, RLHFError]:
            self._publication += 1
            return await receivers.without(receivers.calls(
                Generator.begin_weights, self._publication, self.version, size.buckets, resend, *unchanged))

        if unchanged is not None:
            # A generator may lack the omitted tensors, or the digests may be lost: then the publication is whole.
            with suppress(WeightsError):
                if not await missed(plan.changing, unchanged):
                    return plan.changing
        if await missed(plan.whole):
            raise WeightsError(f"weights version {self.version} could not be announced")
        return plan.whole

    async def _send(self, receivers: BroadcastGroup, size: PublicationSize, whole: bool) -> None:
        if self._direct:
            await self._direct.send(receivers, self.version, self._publication, size, whole)
            return
        under_way: deque[tuple[int, list[Call[Any]], list[Call[Any]]]] = deque()
        for index in range(size.buckets):
            bucket = self._gathered(index, whole)
            under_way.append((index, bucket, receivers.calls(Generator.load_weights, bucket[0].ref, self._publication)))
            # While one is loaded, the next is in the store and another one is gathered.
            if len(under_way) == BUCKETS_IN_STORE:
                await self._loaded(receivers, whole, *under_way.popleft())
        reached("publication_begun")
        while under_way:
            await self._loaded(receivers, whole, *under_way.popleft())

    def _gathered(self, index: int, whole: bool) -> list[Call[Any]]:
        """Calls to all ranks; the result of the first rank is the bucket."""
        return self.roles.policy.call_all(PolicyLearner.weight_bucket, self.version, index, whole)

    async def _loaded(
        self, receivers: BroadcastGroup, whole: bool, index: int, bucket: list[Call[Any]], loads: list[Call[Any]]
    ) -> None:
        """Wait until all generators have loaded a bucket. Those for which its bytes are lost or damaged get it once
        more, gathered again; a generator for which it is so again is replaced.

        Learners are waited for first: a generator cannot answer before them, and must not be blamed if one hangs.
        """
        await asyncio.gather(*(call.done() for call in bucket))
        missed = await receivers.without(loads)
        if not missed:
            return
        noticed, group, log = time.perf_counter(), self._dispatcher.group, self._dispatcher.health.log
        bucket = self._gathered(index, whole)
        again = receivers.calls(Generator.load_weights, bucket[0].ref, self._publication, only=missed)
        await asyncio.gather(*(call.done() for call in bucket))
        still = await receivers.without(again)
        for rank, error in missed.items():
            if isinstance(error, DamagedBucket):
                arrived = rank in receivers.ranks and rank not in still
                seconds = time.perf_counter() - noticed if arrived else None
                log.damaged(group.role, rank, group.incarnation(rank), str(error), seconds)
        for rank, error in still.items():
            receivers.give_up_on(f"did not get bucket {index} of weights version {self.version} "
                                 f"intact in two attempts: {first_line(error)}", "broke", only={rank})
