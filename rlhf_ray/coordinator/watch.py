"""Who hangs? A worker that has work and gives no sign of life for `cluster.heartbeat_timeout_s` is taken for lost.

A generator's sign of life is a token: a stopped engine may still be told healthy by those around it. While it takes new
weights it makes none, and an answer is enough. Of other workers it is the count of `cluster.beat`, which stands still
only with their process or their node; what hangs otherwise is left to the deadline of its call.
"""

import asyncio
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace

from rlhf_ray.cluster.worker_group import WorkerGroup
from rlhf_ray.coordinator.dispatcher import WorkerDispatcher
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.errors import RLHFError, WorkerLost

LOOKS = 4
"""Looks within a lease."""
SELDOM_S = 5.0
"""Between two looks, with long leases."""
NO_ANSWER = -1.0


@dataclass
class Shown:
    """What a worker's incarnation showed last."""

    incarnation: int
    sign: float
    changed: float
    """When the sign was first seen, by the step clock."""
    answered: int
    """Calls that its rank had answered by then."""


class Watch:
    """Looks at the workers of a run's dispatchers that have calls under way. (Learners: see `cluster.pulse`.)"""

    def __init__(self, roles: RoleGroups, heartbeat_timeout_s: float) -> None:
        self._roles, self._heartbeat_timeout_s = roles, heartbeat_timeout_s
        self._period_s = min(SELDOM_S, heartbeat_timeout_s / LOOKS)
        self._dispatchers = roles.dispatchers
        self._shown: dict[tuple[str, int], Shown] = {}

    async def keep_looking(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.look()

    async def look(self) -> None:
        """Look once at everybody who has been at a call for a part of the lease. Most calls are over before, and to ask
        costs the driver as much as a call does."""
        phases: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
        for task in self._roles.clock.under_way:
            phases[task.role, task.worker].append((task.since, task.phase))
        begun = self._roles.clock.now() - self._heartbeat_timeout_s / LOOKS
        phases = {who: calls for who, calls in phases.items() if min(calls)[0] <= begun}
        self._shown = {who: shown for who, shown in self._shown.items() if who in phases}
        await asyncio.gather(*(self._look_at(self._dispatchers[role], rank, found)
                               for (role, rank), found in phases.items() if role in self._dispatchers))

    async def _look_at(self, dispatcher: WorkerDispatcher, rank: int, calls: list[tuple[float, str]]) -> None:
        """`calls`: since when, and what; those that are under way."""
        group = dispatcher.group
        now, incarnation = self._roles.clock.now(), group.incarnation(rank)
        (since, method), publishing = min(calls), any(phase == "publish" for _, phase in calls)
        shown, answered = self._shown.get((group.role, rank)), dispatcher.finished[rank]
        if shown is not None and shown.incarnation == incarnation and shown.answered != answered:
            self._shown[group.role, rank] = replace(shown, changed=now, answered=answered)
            return  # one that has answered a call meanwhile need not be asked
        sign = await self._sign(group, rank, publishing, now)
        if sign is None:
            return
        if sign is NO_ANSWER and shown is not None:
            sign = shown.sign
        if shown is None or shown.incarnation != incarnation or shown.sign != sign:
            # Not since it was called: there may have been signs that nobody looked for.
            self._shown[group.role, rank] = Shown(incarnation, sign, now, answered)
            return
        silent = now - max(shown.changed, since)
        if silent > self._heartbeat_timeout_s and group.incarnation(rank) == incarnation:
            what = "made no token" if group is self._roles.generators and not publishing else "gave no sign of life"
            error = WorkerLost(f"{group.role}/{rank} {what} for {silent:.0f} s while {method} was under way for "
                               f"{now - since:.0f} s (cluster.heartbeat_timeout_s={self._heartbeat_timeout_s:g})",
                               group.role, rank, incarnation, method, "hung", now - since)
            self._roles.healing.lost(dispatcher, error, silent_s=silent)

    async def _sign(self, group: WorkerGroup, rank: int, publishing: bool, now: float) -> float | None:
        """Something that changes while the worker lives; None where nothing can be seen."""
        if group is not self._roles.generators:
            with suppress(Exception):  # a control service that gives no answer now: there is another look
                return await group.sign_of_life(rank)
            return None
        try:
            tokens: int = await group.call(rank, "tokens_made", timeout_s=self._period_s).value()
        except RLHFError:
            return NO_ANSWER  # one that died, or broke, is noticed by those who wait for it
        return now if publishing else float(tokens)
