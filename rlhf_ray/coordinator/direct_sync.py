"""Publications whose bytes go from GPU to GPU: learner and generators meet, and hand over bucket by bucket.

The steps around it are `WeightSync`'s: who gets a version, what it consists of, who confirmed it. Buckets come one
after the other here; the next one is gathered while one travels.
"""

import asyncio

from rlhf_ray.cluster.calls import Call
from rlhf_ray.coordinator.audience import Audience
from rlhf_ray.coordinator.team import Team
from rlhf_ray.errors import WeightsError
from rlhf_ray.records import PublicationSize, WeightRoute

DIRECT = ("nccl", "ipc")


class DirectSync:
    """One transport from GPU to GPU.

    A broadcast joins the learner's first rank with every process of every generator. It is joined anew when one of them
    is another process than before. One that is lost in the middle of it leaves the others waiting, the learner too,
    until a deadline finds them hung: then they are replaced as well.
    """

    def __init__(self, transport: str, team: Team) -> None:
        self._transport, self._team = transport, team
        self._joined: tuple[tuple[str, int, int], ...] = ()

    async def connect(self, audience: Audience) -> None:
        """Let the learner and these generators meet, where they have not."""
        members = self._members(audience)
        if members == self._joined:
            return
        self._joined = ()
        offsets, world = await self._offsets(audience)
        route = await self._route(world)
        learners = self._team.policy.call_all("connect_weights", route)
        group = self._team.generators
        generators = [group.call(rank, "connect_weights", route, offset) for rank, offset in offsets.items()]
        await asyncio.gather(audience.without(generators), *(call.done() for call in learners))
        if self._members(audience) == members:  # else one was lost, and the others are joined to nobody
            self._joined = members

    async def send(self, audience: Audience, version: int, size: PublicationSize, whole: bool) -> None:
        """Hand all buckets over.

        Raises:
            WeightsError: a generator refused one, or did not get its description.
            WorkerLost: a learner was lost.
        """
        offered = self._offer(version, 0, whole)
        for index in range(size.buckets):
            loads = audience.calls("load_weights", offered[0].ref)
            sends = self._team.policy.call_all("send_bucket") if self._transport == "nccl" else []
            present, offered = offered, self._offer(version, index + 1, whole) if index + 1 < size.buckets else []
            await asyncio.gather(*(call.done() for call in (*present, *sends)))
            if await audience.without(loads):
                raise WeightsError(f"bucket {index} of weights version {version} was not announced to all")

    async def finished(self) -> None:
        """All have confirmed: the learner keeps no bucket any more."""
        await asyncio.gather(*(call.done() for call in self._team.policy.call_all("release_weights")))

    def forget(self) -> None:
        """The learners are others than before."""
        self._joined = ()

    def _offer(self, version: int, index: int, whole: bool) -> list[Call]:
        return self._team.policy.call_all("offer_bucket", version, index, whole)

    def _members(self, audience: Audience) -> tuple[tuple[str, int, int], ...]:
        """(role, rank, incarnation) of everyone who takes part."""
        policy, generators = self._team.policy, self._team.generators
        return (*((policy.role, rank, policy.incarnation(rank)) for rank in range(len(policy))),
                *((generators.role, rank, generators.incarnation(rank)) for rank in audience.ranks))

    async def _offsets(self, audience: Audience) -> tuple[dict[int, int], int]:
        """The first process of each generator in a broadcast, by rank, and how many there are with the learner's."""
        calls = audience.calls("devices")
        await audience.without(calls)
        world, offsets = 1, {}
        for call in (call for call in calls if call.rank in audience.ranks):
            offsets[call.rank] = world
            world += int(await call.value())
        return offsets, world

    async def _route(self, world: int) -> WeightRoute:
        if self._transport != "nccl":
            return WeightRoute(self._transport)
        first = self._team.policy
        host = await first.call(0, "node_host").value()
        _, _, port = (await first.call(0, "rendezvous", host).value()).rpartition(":")
        return WeightRoute(self._transport, host, int(port), world)
