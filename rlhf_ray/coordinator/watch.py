"""Detection of hanging workers: one that has a call and is silent for `cluster.heartbeat_timeout_s` is lost.

A generator's sign of life is a new token, because the process of a stopped engine may still answer. While a generator
loads weights it produces no tokens, and an answer is enough. The sign of life of other workers is the counter of
`cluster.beat`, which stops only with their process or node; the deadlines of calls detect other hangs.
"""

import asyncio
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace

from rlhf_ray.cluster.worker_group import WorkerGroup
from rlhf_ray.coordinator.dispatcher import WorkerDispatcher
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.errors import RLHFError, WorkerLost

CHECKS = 4
"""Checks within the heartbeat timeout."""
LONGEST_PERIOD_S = 5.0
"""Most seconds between two checks."""
NO_ANSWER = -1.0


@dataclass
class Shown:
    """The last sign of life of a worker's incarnation."""

    incarnation: int
    sign: float
    changed: float
    """Time at which the sign was first seen, by the step clock."""
    answered: int
    """Calls that its rank had finished by then."""


class Watch:
    """Checks the workers of a run's dispatchers that have calls under way. (For learners see `cluster.pulse`.)"""

    def __init__(self, roles: RoleGroups, heartbeat_timeout_s: float) -> None:
        self._roles, self._heartbeat_timeout_s = roles, heartbeat_timeout_s
        self._period_s = min(LONGEST_PERIOD_S, heartbeat_timeout_s / CHECKS)
        self._dispatchers = roles.dispatchers
        self._shown: dict[tuple[str, int], Shown] = {}

    async def keep_looking(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.look()

    async def look(self) -> None:
        """Check each worker once whose call is older than a part of the timeout. Most calls are finished before, and a
        check costs the driver as much as a call."""
        phases: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
        for task in self._roles.clock.under_way:
            phases[task.role, task.worker].append((task.since, task.phase))
        begun = self._roles.clock.now() - self._heartbeat_timeout_s / CHECKS
        phases = {worker: calls for worker, calls in phases.items() if min(calls)[0] <= begun}
        self._shown = {worker: shown for worker, shown in self._shown.items() if worker in phases}
        await asyncio.gather(*(self._look_at(self._dispatchers[role], rank, calls)
                               for (role, rank), calls in phases.items() if role in self._dispatchers))

    async def _look_at(self, dispatcher: WorkerDispatcher, rank: int, calls: list[tuple[float, str]]) -> None:
        """Check one worker. `calls`: (start, phase) of its calls under way."""
        group = dispatcher.group
        now, incarnation = self._roles.clock.now(), group.incarnation(rank)
        (since, method), publishing = min(calls), any(phase == "publish" for _, phase in calls)
        shown, answered = self._shown.get((group.role, rank)), dispatcher.finished[rank]
        if shown is not None and shown.incarnation == incarnation and shown.answered != answered:
            self._shown[group.role, rank] = replace(shown, changed=now, answered=answered)
            return  # it has finished a call meanwhile
        sign = await self._sign(group, rank, publishing, now)
        if sign is None:
            return
        if sign is NO_ANSWER and shown is not None:
            sign = shown.sign
        if shown is None or shown.incarnation != incarnation or shown.sign != sign:
            # The time starts now, not with the call: earlier signs may have been missed.
            self._shown[group.role, rank] = Shown(incarnation, sign, now, answered)
            return
        silent = now - max(shown.changed, since)
        if silent > self._heartbeat_timeout_s and group.incarnation(rank) == incarnation:
            what = "produced no token" if group is self._roles.generators and not publishing else "gave no sign of life"
            error = WorkerLost(f"{group.role}/{rank} {what} for {silent:.0f} s while {method} was under way for "
                               f"{now - since:.0f} s (cluster.heartbeat_timeout_s={self._heartbeat_timeout_s:g})",
                               group.role, rank, incarnation, method, "hung", now - since)
            self._roles.healing.lost(dispatcher, error, silent_s=silent)

    async def _sign(self, group: WorkerGroup, rank: int, publishing: bool, now: float) -> float | None:
        """A number that changes while the worker is alive; None if it cannot be read."""
        if group is not self._roles.generators:
            with suppress(Exception):  # the control service does not answer; the next check may succeed
                return await group.sign_of_life(rank)
            return None
        try:
            tokens: int = await group.call(rank, "tokens_made", timeout_s=self._period_s).value()
        except RLHFError:
            return NO_ANSWER  # calls under way raise the error if it died or broke
        return now if publishing else float(tokens)
