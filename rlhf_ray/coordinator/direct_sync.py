"""Publications from GPU to GPU: learner and generators form a group, and transfer bucket by bucket.

`WeightSync` does the other steps: it selects the receivers, plans the publication and collects confirmations. Buckets
are transferred one after the other; the next one is gathered during a transfer.
"""

import asyncio
from typing import Any

from rlhf_ray.coordinator.broadcast_group import BroadcastGroup
from rlhf_ray.errors import RLHFError, WorkerLost, first_line
from rlhf_ray.records import PublicationSize, WeightRoute
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.workers.calls import Call, Deadline
from rlhf_ray.workers.role_groups import RoleGroups

DIRECT = ("nccl", "ipc")
ALONE_S = 20.0
"""Grace period for the other members of a broadcast when one is lost: a bucket takes about a second."""


class DirectSync:
    """One transport from GPU to GPU.

    The group of a broadcast consists of the learner's first rank and all processes of all generators. It is formed
    again when one of them was replaced. If a member is lost during a broadcast, all others hang, the learner too,
    because an NCCL collective cannot be left: after a grace period they are given up and replaced as well.
    """

    def __init__(self, transport: str, roles: RoleGroups, patience: Deadline | None = None) -> None:
        """`patience`: longest time in which a generator receives one bucket; None: the timeout of calls."""
        self._transport, self._roles, self._patience = transport, roles, patience
        self._joined: tuple[tuple[str, int, int], ...] = ()

    async def connect(self, receivers: BroadcastGroup) -> bool:
        """Form the group of the learner and these generators, unless it exists; returns whether it was formed.

        Raises:
            WorkerLost: a learner was lost, or waits for a lost generator, which the error names.
        """
        members = self._members(receivers)
        if members == self._joined:
            return False
        self._joined = ()
        offsets, world = await self._offsets(receivers)
        route = await self._route(world)
        learners = self._roles.policy.call_all(PolicyLearner.connect_weights, route)
        group = self._roles.generators
        generators = [group.call(rank, Generator.connect_weights, route, offset) for rank, offset in offsets.items()]
        await self._together(receivers, learners, generators, "the connection")
        if self._members(receivers) == members:  # otherwise one was lost, and there is no group
            self._joined = members
        return True

    async def send(
        self, receivers: BroadcastGroup, version: int, publication: int, size: PublicationSize, whole: bool
    ) -> None:
        """Transfer all buckets.

        Raises:
            WeightsError: a generator refused a bucket.
            WorkerLost: a learner was lost, or waits for a lost generator, which the error names.
        """
        offered: list[Call[Any]] = []
        for index in range(size.buckets):
            # If one was lost between two buckets, the group is formed again and the bucket is offered again.
            if await self.connect(receivers) or not offered:
                offered = self._offer(version, index, whole)
            if not receivers.ranks:
                return
            loads = receivers.calls(Generator.load_weights, offered[0].ref, publication, deadline=self._patience)
            sends = self._roles.policy.call_all(PolicyLearner.send_bucket) if self._transport == "nccl" else []
            present, offered = offered, self._offer(version, index + 1, whole) if index + 1 < size.buckets else []
            await asyncio.gather(*(call.done() for call in present))
            what = f"bucket {index} of weights version {version}"
            if missed := await self._together(receivers, sends, loads, what):
                receivers.give_up_on(f"did not get the description of {what}: "
                                     f"{first_line(next(iter(missed.values())))}", "broke", only=missed)

    async def finished(self) -> None:
        """Release the learner's buckets after all generators have confirmed."""
        await asyncio.gather(*(call.done() for call in self._roles.policy.call_all(PolicyLearner.release_weights)))

    def forget(self) -> None:
        """Form the group again at the next publication, because the learners are replaced."""
        self._joined = ()

    async def _together(
        self, receivers: BroadcastGroup, learners: list[Call[Any]], generators: list[Call[Any]], what: str
    ) -> dict[int, RLHFError]:
        """Wait for calls in which learner and generators wait for each other; returns the ranks of generators whose
        argument was lost or damaged, with the errors. If the learner failed or does not return, generators that still
        wait for it are given up.

        Raises:
            WorkerLost: the learner does not return although a generator did, or was lost.
        """
        ours: asyncio.Future[Any] = asyncio.create_task(_done(learners))
        theirs: asyncio.Future[Any] = asyncio.create_task(receivers.without(generators))
        left: asyncio.Future[Any] = receivers.next_loss()
        before = len(receivers.losses)
        try:
            await asyncio.wait({ours, theirs, left}, return_when=asyncio.FIRST_COMPLETED)
            # The learner may notice a loss before Ray reports it, and may have sent the bucket nevertheless.
            await asyncio.wait({left if _failed(ours) else ours}, timeout=ALONE_S)
            if ours.done() and not _failed(ours):
                return await theirs
            if _failed(ours) and not left.done():
                await ours
            raise self._broken(receivers, what, "; ".join(map(str, receivers.losses[before:])) or _outcome(theirs))
        except BaseException:
            if not theirs.done():
                receivers.give_up_on(f"waits for {what}, which the learner does not finish")
            raise
        finally:
            for waiting in (ours, theirs, left):
                waiting.cancel()

    def _broken(self, receivers: BroadcastGroup, what: str, reason: str) -> WorkerLost:
        """The learner's error. The remaining generators, which have at most a part of the model, are given up too."""
        receivers.give_up_on(f"waits for {what}, which another generator left: {reason}")
        learner = self._roles.policy
        return WorkerLost(f"{learner.role}/0 hangs in {what}, because a generator did not take part: {reason}",
                          learner.role, 0, learner.incarnation(0), PolicyLearner.send_bucket.__name__, "hung")

    def _offer(self, version: int, index: int, whole: bool) -> list[Call[Any]]:
        return self._roles.policy.call_all(PolicyLearner.offer_bucket, version, index, whole)

    def _members(self, receivers: BroadcastGroup) -> tuple[tuple[str, int, int], ...]:
        """(role, rank, incarnation) of all members."""
        policy, generators = self._roles.policy, self._roles.generators
        return (*((policy.role, rank, policy.incarnation(rank)) for rank in range(len(policy))),
                *((generators.role, rank, generators.incarnation(rank)) for rank in receivers.ranks))

    async def _offsets(self, receivers: BroadcastGroup) -> tuple[dict[int, int], int]:
        """Each generator's first process in a broadcast, by rank, and the number of processes with the learner's."""
        calls = receivers.calls(Generator.devices)
        await receivers.without(calls)
        world, offsets = 1, {}
        for call in (call for call in calls if call.rank in receivers.ranks):
            offsets[call.rank] = world
            world += await call.value()
        return offsets, world

    async def _route(self, world: int) -> WeightRoute:
        if self._transport != "nccl":
            return WeightRoute(self._transport)
        processes = self._roles.policy.processes(0)
        assert processes is not None  # it has started
        return await self._roles.policy.call(0, PolicyLearner.broadcast_route, processes.host, world).value()


async def _done(calls: list[Call[Any]]) -> None:
    await asyncio.gather(*(call.done() for call in calls))


def _failed(calls: "asyncio.Future[Any]") -> bool:
    return calls.done() and not calls.cancelled() and calls.exception() is not None


def _outcome(calls: "asyncio.Future[Any]") -> str:
    """Why finished calls failed: an error, or the ranks whose argument was lost."""
    return str(calls.exception() or f"the announcement did not reach ranks {sorted(calls.result())}")
