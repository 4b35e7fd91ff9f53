"""Publications whose bytes go from GPU to GPU: learner and generators meet, and hand over bucket by bucket.

The steps around it are `WeightSync`'s: who gets a version, what it consists of, who confirmed it. Buckets come one
after the other here; the next one is gathered while one travels.
"""

import asyncio
from typing import Any

from rlhf_ray.cluster.calls import Call
from rlhf_ray.coordinator.broadcast_group import BroadcastGroup
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.errors import WeightsError, WorkerLost
from rlhf_ray.records import PublicationSize, WeightRoute

DIRECT = ("nccl", "ipc")


ALONE_S = 20.0
"""What the others of a broadcast get to end it when one of them is lost: a bucket takes a second or so."""


class DirectSync:
    """One transport from GPU to GPU.

    A broadcast joins the learner's first rank with every process of every generator. It is joined anew when one of them
    is another process than before. One that is lost in the middle of it leaves the others waiting, the learner too:
    there is no way to leave a collective call of NCCL's, so they are given up soon after it, and replaced as well.
    """

    def __init__(self, transport: str, roles: RoleGroups, patience_s: float | None = None) -> None:
        """`patience_s`: longest wait for a generator to take one bucket; that of any call where there is none."""
        self._transport, self._roles, self._patience_s = transport, roles, patience_s
        self._joined: tuple[tuple[str, int, int], ...] = ()

    async def connect(self, receivers: BroadcastGroup) -> bool:
        """Let the learner and these generators meet, where they have not; whether they had to.

        Raises:
            WorkerLost: a learner was lost, or waits for a generator that was, which it names.
        """
        members = self._members(receivers)
        if members == self._joined:
            return False
        self._joined = ()
        offsets, world = await self._offsets(receivers)
        route = await self._route(world)
        learners = self._roles.policy.call_all("connect_weights", route)
        group = self._roles.generators
        generators = [group.call(rank, "connect_weights", route, offset) for rank, offset in offsets.items()]
        await self._together(receivers, learners, generators, "the meeting")
        if self._members(receivers) == members:  # else one was lost, and the others are joined to nobody
            self._joined = members
        return True

    async def send(
        self, receivers: BroadcastGroup, version: int, publication: int, size: PublicationSize, whole: bool
    ) -> None:
        """Hand all buckets over.

        Raises:
            WeightsError: a generator refused one, or did not get its description.
            WorkerLost: a learner was lost, or waits for a generator that was, which it names.
        """
        offered: list[Call] = []
        for index in range(size.buckets):
            # Where one was lost between two buckets, the others meet again, and what was offered before is forgotten.
            if await self.connect(receivers) or not offered:
                offered = self._offer(version, index, whole)
            if not receivers.ranks:
                return
            loads = receivers.calls("load_weights", offered[0].ref, publication, timeout_s=self._patience_s)
            sends = self._roles.policy.call_all("send_bucket") if self._transport == "nccl" else []
            present, offered = offered, self._offer(version, index + 1, whole) if index + 1 < size.buckets else []
            await asyncio.gather(*(call.done() for call in present))
            what = f"bucket {index} of weights version {version}"
            if await self._together(receivers, sends, loads, what):
                raise WeightsError(f"{what} was not announced to all")

    async def finished(self) -> None:
        """All have confirmed: the learner keeps no bucket any more."""
        await asyncio.gather(*(call.done() for call in self._roles.policy.call_all("release_weights")))

    def forget(self) -> None:
        """The learners are others than before."""
        self._joined = ()

    async def _together(
        self, receivers: BroadcastGroup, learners: list[Call], generators: list[Call], what: str
    ) -> set[int]:
        """Wait for calls in which both sides wait for each other; the generators that did not get their argument. Where
        nobody waits any more, or the learner failed, generators that still wait for it are given up.

        Raises:
            WorkerLost: the learner did not come to an end although a generator did, or was lost.
        """
        ours: asyncio.Future[Any] = asyncio.create_task(_done(learners))
        theirs: asyncio.Future[Any] = asyncio.create_task(receivers.without(generators))
        left: asyncio.Future[Any] = receivers.next_loss()
        before = len(receivers.losses)
        try:
            await asyncio.wait({ours, theirs, left}, return_when=asyncio.FIRST_COMPLETED)
            # The learner may notice that one is gone before Ray tells of it, and have sent all the same.
            await asyncio.wait({left if _failed(ours) else ours}, timeout=ALONE_S)
            if ours.done() and not _failed(ours):
                return await theirs
            if _failed(ours) and not left.done():
                await ours
            raise self._broken(receivers, what, "; ".join(map(str, receivers.losses[before:])) or _outcome(theirs))
        except BaseException:
            if not theirs.done():
                receivers.give_up_on("load_weights", f"waits for {what}, which the learner will not end")
            raise
        finally:
            for waiting in (ours, theirs, left):
                waiting.cancel()

    def _broken(self, receivers: BroadcastGroup, what: str, reason: str) -> WorkerLost:
        """What to say of the learner. Who was to receive has a part of the model at best, and is given up as well."""
        receivers.give_up_on("load_weights", f"waits for {what}, which one left: {reason}")
        learner = self._roles.policy
        return WorkerLost(f"{learner.role}/0 waits for generators with {what}, and one will not come: {reason}",
                          learner.role, 0, learner.incarnation(0), "send_bucket", "hung")

    def _offer(self, version: int, index: int, whole: bool) -> list[Call]:
        return self._roles.policy.call_all("offer_bucket", version, index, whole)

    def _members(self, receivers: BroadcastGroup) -> tuple[tuple[str, int, int], ...]:
        """(role, rank, incarnation) of everyone who takes part."""
        policy, generators = self._roles.policy, self._roles.generators
        return (*((policy.role, rank, policy.incarnation(rank)) for rank in range(len(policy))),
                *((generators.role, rank, generators.incarnation(rank)) for rank in receivers.ranks))

    async def _offsets(self, receivers: BroadcastGroup) -> tuple[dict[int, int], int]:
        """The first process of each generator in a broadcast, by rank, and how many there are with the learner's."""
        calls = receivers.calls("devices")
        await receivers.without(calls)
        world, offsets = 1, {}
        for call in (call for call in calls if call.rank in receivers.ranks):
            offsets[call.rank] = world
            world += int(await call.value())
        return offsets, world

    async def _route(self, world: int) -> WeightRoute:
        if self._transport != "nccl":
            return WeightRoute(self._transport)
        first = self._roles.policy
        host = await first.call(0, "node_host").value()
        _, _, port = (await first.call(0, "rendezvous", host).value()).rpartition(":")
        return WeightRoute(self._transport, host, int(port), world)


async def _done(calls: list[Call]) -> None:
    await asyncio.gather(*(call.done() for call in calls))


def _failed(calls: "asyncio.Future[Any]") -> bool:
    return calls.done() and not calls.cancelled() and calls.exception() is not None


def _outcome(calls: "asyncio.Future[Any]") -> str:
    """Why calls that are over ended as they did: an error, or the ranks that did not get their argument."""
    return str(calls.exception() or f"what was announced did not reach {sorted(calls.result())}")
