"""The workers of a PPO run by role, and whose turn it is."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

from rlhf_ray.cluster.calls import Call
from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.observability.spans import StepClock, Task


@dataclass(frozen=True)
class Team:
    """Everything the coordinator calls."""

    generators: WorkerGroup
    reference: WorkerGroup | None
    """None where the policy's own frozen base is the reference."""
    reward: WorkerGroup
    assembler: WorkerGroup
    policy: WorkerGroup
    critic: WorkerGroup | None
    """None for estimators without a critic, and where the policy is its own."""
    clock: StepClock
    """Where every call's working time is noted."""

    def groups(self) -> list[WorkerGroup]:
        """All groups, in the order in which a step meets them."""
        reference = [] if self.reference is None else [self.reference]
        return [self.generators, *reference, self.reward, self.assembler, *self.learners()]

    def learners(self) -> list[WorkerGroup]:
        """The groups with a model under training."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def workers(self) -> dict[str, int]:
        """Number of workers by role."""
        return {group.role: len(group) for group in self.groups()}

    async def done(self, call: Call, phase: str) -> Call:
        """Wait for a call without fetching its result, and note its working time under its role and `phase`."""
        with self.clock.waiting_for(Task(call.role, call.rank, phase, call.started)):
            timing = await call.done()
        self.clock.add_returned(call.role, timing.seconds, call.rank)
        self.clock.add_returned(f"phase:{phase}", timing.seconds, call.rank)
        return call

    async def value(self, call: Call, phase: str, index: int = 0) -> Any:
        """Wait for a call as `done` does, and fetch one of its results."""
        await self.done(call, phase)
        return await call.value(index)


class Rotation:
    """Which worker of a group to call next: the one with least work under way, the lowest rank among equals."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self._load = [0] * len(group)
        self._order = [(0, rank) for rank in range(len(group))]
        """(load, rank) of every worker, in order."""

    def take(self, work: int) -> int:
        """A rank, charged with `work` (any unit) until `give_back`."""
        rank = self._order[0][1]
        self._charge(rank, work)
        return rank

    def give_back(self, rank: int, work: int) -> None:
        """The work is done."""
        self._charge(rank, -work)

    def _charge(self, rank: int, work: int) -> None:
        """Move a worker to where its new load belongs; there may be hundreds, so by bisection."""
        del self._order[bisect_left(self._order, (self._load[rank], rank))]
        self._load[rank] += work
        insort(self._order, (self._load[rank], rank))
