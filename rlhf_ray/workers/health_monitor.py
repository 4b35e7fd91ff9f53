"""The one place that decides what the loss of a worker means, and replaces lost workers while the others continue.

Detectors report: a call that fails (Ray says that the process is gone, or the deadline of the call has passed), the
heartbeats of processes, and the tokens of generators (`detectors`). `HealthMonitor` answers each report with a
`Decision`. Replies of a process that was given up are ignored from then on (`workers.calls.Fence`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import RLHFError, WorkerError, WorkerLost, first_line
from rlhf_ray.observability.background_task import background_task
from rlhf_ray.observability.faults import FaultLog
from rlhf_ray.observability.progress import duration
from rlhf_ray.observability.spans import StepClock
from rlhf_ray.workers.actor_class import Process
from rlhf_ray.workers.calls import Call, Deadline
from rlhf_ray.workers.scheduler import LeastLoadedScheduler
from rlhf_ray.workers.worker_group import WorkerGroup

FIRST_DELAY_S = 15.0
"""Delay before the first restart of a worker beyond `cluster.max_restarts`, while others of its group work; each one is
twice the one before."""
LONGEST_DELAY_S = 600.0
CHECKS = 4
"""Checks of a worker within the heartbeat timeout. Most calls are finished before the first one."""
LONGEST_PERIOD_S = 5.0
"""Most seconds between two checks."""

GroupScheduler = LeastLoadedScheduler[WorkerGroup]
Ready = Callable[[int, Callable[[], None]], Awaitable[str]]
"""Brings a worker that has just started to the state of the others, and readmits it by calling the second argument.
Returns the worker's state in words, or an empty string."""


class Decision(Enum):
    """What the caller does about a loss."""

    RETRY = "repeat the call: the worker is being replaced, and another one may be available"
    REPRODUCE = "produce the arguments again: an object was lost with a node"
    RESTART_LEARNERS = "restart all learners from the last checkpoint"
    FAIL = "raise the error"


class Detector(Protocol):
    """Reports lost workers to the monitor."""

    name: str

    async def run(self) -> None:
        """Check until cancelled."""


@dataclass
class Loss:
    """A lost worker that is being replaced."""

    error: WorkerLost
    """How the loss was detected."""
    since: float
    """Time of the detection, by the step clock."""
    silent_s: float | None
    """Seconds without a sign of life, if the loss was detected by them."""
    pid: int | None
    work_again: int = 0
    """Work repeated by other workers since its last line in the log: samples for generators, otherwise calls."""
    recorded_s: float | None = None
    """Seconds down at its last line in the log, if it has one."""

    @property
    def recorded(self) -> bool:
        """Whether the log has a line of it: the worker is back, missing, or will not be replaced."""
        return self.recorded_s is not None


async def as_started(_: int, readmit: Callable[[], None]) -> str:
    """`Ready` of workers that need no more than their start."""
    readmit()
    return ""


class HealthMonitor:
    """Decides about losses. Registered workers are replaced one by one. One that is lost repeatedly without completing
    a call, or cannot start, is missing for longer and longer before it is started again, while the others of its group
    work; when none is left, the run ends. Learners are restarted together, because their state is sharded over all of
    them."""

    def __init__(self, config: ClusterConfig | None = None, log: FaultLog | None = None,
                 clock: StepClock | None = None) -> None:
        """`clock` has the calls under way."""
        self._config = config or ClusterConfig()
        self.heartbeat_timeout_s = self._config.heartbeat_timeout_s
        self.log = log or FaultLog()
        self.clock = clock or StepClock()
        self._schedulers: dict[str, GroupScheduler] = {}
        self._ready: dict[str, Ready] = {}
        self._learners: dict[str, WorkerGroup] = {}
        self._replacements: dict[tuple[str, int], asyncio.Task[None]] = {}
        """The newest replacement of each worker."""
        self._set_aside: set[tuple[str, int]] = set()
        self._consecutive_restarts: dict[tuple[str, int], tuple[int, int]] = {}
        """Worker -> (consecutive restarts, calls that it had completed at the last one)."""
        self.down: dict[tuple[str, int], Loss] = {}
        """Workers that are being replaced, by (role, rank)."""
        self.irreplaceable_error: RLHFError | None = None
        """Why the last worker of a role is not replaced, so that the run ends."""
        self._delayed: set[tuple[str, int]] = set()
        """Those of them whose next restart is delayed."""

    def register(self, scheduler: GroupScheduler, ready: Ready = as_started) -> None:
        """From now on, replace the workers of a scheduler when they are lost."""
        role = scheduler.group.role
        self._ready[role] = ready
        self._schedulers[role] = scheduler

    def register_learners(self, groups: Iterable[WorkerGroup]) -> None:
        """Groups whose workers are restarted together."""
        self._learners = {group.role: group for group in groups}

    def lost(self, error: WorkerLost, work: int = 0, silent_s: float | None = None) -> Decision:
        """Decide about a loss, and start the replacement of the worker; later reports of the same loss change nothing.
        Does not block.

        Args:
            work: to be repeated because of the loss.
            silent_s: seconds without a sign of life, if the loss was detected by them.
        """
        if error.kind == "result":
            return Decision.REPRODUCE
        if error.role in self._learners:
            return Decision.RESTART_LEARNERS
        if error.role not in self._schedulers:
            return Decision.FAIL
        self._replace(self._schedulers[error.role], error, work, silent_s)
        return Decision.RETRY

    async def decide(self, error: WorkerError) -> Decision:
        """Decide about a failure that ended the training loop. A missing result may be the first sign of a lost
        learner: then all learners are checked for liveness; they may be busy."""
        if error.role in self._learners:
            return Decision.RESTART_LEARNERS
        if isinstance(error, WorkerLost) and error.kind == "result":
            calls = [group.own_call(rank, Process.own_processes, deadline=Deadline(
                self._config.heartbeat_timeout_s, "cluster.heartbeat_timeout_s"))
                     for group in self._learners.values() for rank in group.ranks]
            if not all(await asyncio.gather(*map(_answers, calls))):
                return Decision.RESTART_LEARNERS
        return Decision.FAIL

    def watched(self) -> Iterator[tuple[WorkerGroup, int]]:
        """The workers whose heartbeats are checked. Learners always: a rank that waits for another rank looks as busy
        as that one. Others while a call to them takes long."""
        for group in self._learners.values():
            yield from ((group, rank) for rank in group.ranks)
        for role, rank in self.long_calls():
            if role in self._schedulers:
                yield self._schedulers[role].group, rank

    def long_calls(self) -> dict[tuple[str, int], tuple[float, str]]:
        """The workers' `_oldest_calls` that have lasted for a part of the heartbeat timeout."""
        begun = self.clock.now() - self._config.heartbeat_timeout_s / CHECKS
        return {worker: call for worker, call in self._oldest_calls().items() if call[0] <= begun}

    def silent(self, group: WorkerGroup, rank: int, silent_s: float, sign: str = "gave no sign of life") -> None:
        """A detector's report: a worker gave no sign of life for `silent_s` seconds."""
        limit = f"cluster.heartbeat_timeout_s={self._config.heartbeat_timeout_s:g}"
        if group.role in self._learners:
            group.give_up(rank, f"its process has stood still for {silent_s:.0f} s ({limit})")
            return
        now = self.clock.now()
        since, method = self._oldest_calls().get((group.role, rank), (now, "no call"))
        self.lost(WorkerLost(f"{group.role}/{rank} {sign} for {silent_s:.0f} s while {method} was under way for "
                             f"{now - since:.0f} s ({limit})",
                             group.role, rank, group.incarnation(rank), method, "hung", now - since), 0, silent_s)

    @contextmanager
    def set_aside(self, role: str, ranks: Iterable[int]) -> Iterator[None]:
        """Replace none of these workers during the enclosed work, because they are being added or removed. Replacements
        under way are cancelled."""
        members = {(role, rank) for rank in ranks}
        self._set_aside |= members
        try:
            for member in members & self.down.keys():
                self._replacements[member].cancel()
                self._record(self.down.pop(member), None, "it was removed before its restart was complete")
            yield
        finally:
            self._set_aside -= members

    @asynccontextmanager
    async def at_work(self, detectors: Sequence[Detector] = ()) -> AsyncIterator[None]:
        """Run the detectors during the enclosed work; afterwards cancel all replacements, because the workers are about
        to be stopped."""
        try:
            async with AsyncExitStack() as stack:
                for detector in detectors:
                    await stack.enter_async_context(
                        background_task(detector.name, detector.run, self.log.failed, essential=True))
                yield
        finally:
            for task in self._replacements.values():
                task.cancel()
            await asyncio.gather(*self._replacements.values(), return_exceptions=True)
            for loss in self.down.values():
                if not loss.recorded:
                    self._record(loss, None, "the run ended before its restart was complete")

    @property
    def missing(self) -> set[tuple[str, int]]:
        """Workers, by (role, rank), that could not be replaced within `cluster.max_restarts` restarts."""
        return {worker for worker, loss in self.down.items() if loss.recorded}

    def metrics(self) -> dict[str, float]:
        """`FaultLog.take`, and the number of missing workers."""
        return {**self.log.take(), "faults/missing_workers": float(len(self.missing))}

    def status(self, now: float) -> list[dict[str, Any]]:
        """One line per worker that is being replaced: its name, how it was lost, and seconds since then."""
        return [{"worker": loss.error.worker,
                 "lost": _how(loss.error) + (", not replaced yet" if loss.recorded else ""),
                 "seconds": round(now - loss.since, 1)} for loss in self.down.values()]

    def _oldest_calls(self) -> dict[tuple[str, int], tuple[float, str]]:
        """(start, phase) of the oldest call under way of each worker, by role and rank."""
        oldest: dict[tuple[str, int], tuple[float, str]] = {}
        for task in self.clock.under_way:
            call = (task.since, task.phase)
            oldest[task.role, task.worker] = min(oldest.get((task.role, task.worker), call), call)
        return oldest

    def _replace(self, scheduler: GroupScheduler, error: WorkerLost, work: int, silent_s: float | None) -> None:
        group = scheduler.group
        ranks = group.replica(error.rank)  # those that hold a model together are replaced together
        rank = ranks[0]
        worker = group.role, rank
        if worker in self._set_aside or error.rank not in group.ranks:
            if error.rank in group.ranks:
                group.give_up(error.rank, str(error))
        elif error.incarnation != group.incarnation(error.rank):
            pass  # it was replaced already
        elif worker in self.down:
            for each in ranks:
                group.give_up(each, str(error))  # the new worker may hang before it is readmitted
        else:
            processes = group.processes(error.rank)
            loss = self.down[worker] = Loss(error, self.clock.now(), silent_s, processes.pid if processes else None)
            scheduler.leave_out(rank)
            for each in ranks:
                group.give_up(each, str(error))
            others = ", ".join(f"{group.role}/{each}" for each in ranks if each != error.rank)
            self.log.lost(f"{_described(loss)}; it is restarted" + (f" with {others}" if others else "")
                          + ("" if scheduler.any_up else ", and no other worker is available meanwhile"))
            self._replacements[worker] = asyncio.create_task(
                self._restart_until_ready(scheduler, rank), name=f"replacement of {group.role}/{rank}")
        if worker in self.down:
            self.down[worker].work_again += work

    async def _restart_until_ready(self, scheduler: GroupScheduler, rank: int) -> None:
        """Restart a worker until it is ready. After `max_restarts` in a row, or an error other than its loss, restarts
        are delayed; if no other worker of the group is left then, all calls to the group fail."""
        loss = self.down[scheduler.group.role, rank]
        error: RLHFError = loss.error
        while True:
            excess = self._count_restart(scheduler, rank, error) - self._config.max_restarts
            if excess > 0:
                reason = self._irreplaceable(loss.error.worker, error)
                if not self._others_left(scheduler, rank):
                    self.irreplaceable_error = reason
                    scheduler.fail(reason)
                    self._record(loss, None, str(reason))
                    return
                await self._delay(loss, scheduler.group.role, rank, reason, excess)
            try:
                await self._restart(scheduler, rank, str(error))
                return
            except RLHFError as again:
                error = again
            except Exception as bug:
                error = WorkerError(f"{loss.error.worker} cannot be restarted: {type(bug).__name__}: {bug}")

    async def _restart(self, scheduler: GroupScheduler, rank: int, reason: str) -> None:
        group = scheduler.group
        loss = self.down[group.role, rank]
        await asyncio.gather(*(group.respawn(each, reason) for each in group.replica(rank)))
        await group.start_replica(rank, timeout_s=self._config.start_timeout_s)

        def readmit() -> None:
            del self.down[group.role, rank]
            scheduler.take_back(rank)

        state = await self._ready[group.role](rank, readmit)
        seconds = self.clock.now() - loss.since
        self._record(loss, seconds, state)
        self.log.note(f"{group.role}/{rank} is back after {duration(seconds)}" + (f", {state}" if state else ""))

    def _count_restart(self, scheduler: GroupScheduler, rank: int, error: RLHFError) -> int:
        """Number of the next restart since the worker last completed a call. After an error other than its loss it is
        more than `max_restarts`: the worker cannot start."""
        worker = (scheduler.group.role, rank)
        completed = scheduler.finished[rank]
        restarts, before = self._consecutive_restarts.get(worker, (0, completed))
        restarts = restarts + 1 if before == completed else 1
        if not isinstance(error, WorkerLost):
            restarts = max(restarts, self._config.max_restarts + 1)
        self._consecutive_restarts[worker] = restarts, completed
        return restarts

    def _irreplaceable(self, worker: str, error: RLHFError) -> RLHFError:
        """Why a worker is not replaced at once."""
        if not isinstance(error, WorkerLost):
            return error
        return WorkerError(
            f"{worker} was lost once more after {self._config.max_restarts} restarts (cluster.max_restarts) "
            f"without completing a call in between: {error}", error.role)

    def _others_left(self, scheduler: GroupScheduler, rank: int) -> bool:
        """Whether another worker of the group is available, or being restarted without a delay. One that was lost again
        after a delayed restart, and has completed no call since, does not count: otherwise workers that are lost in
        turns, each in a call that lasts longer than the others' delays, would keep each other in use without end."""
        group = scheduler.group
        return any(not self._fails_on(scheduler, other) for other in group.ranks
                   if other == group.replica(other)[0] != rank)

    def _fails_on(self, scheduler: GroupScheduler, rank: int) -> bool:
        worker = (scheduler.group.role, rank)
        restarts, completed = self._consecutive_restarts.get(worker, (0, 0))
        lost_again = restarts > self._config.max_restarts + 1 and scheduler.finished[rank] == completed
        return lost_again or worker in self._delayed

    async def _delay(self, loss: Loss, role: str, rank: int, reason: RLHFError, excess: int) -> None:
        """Wait before the next restart of a worker that cannot be replaced, the `excess`-th such wait in a row."""
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(excess - 1, 30))
        self.log.warn(f"{first_line(reason).rstrip('.')}. The others of {role} go on; it is started again in "
                      f"{duration(delay_s)}")
        if not loss.recorded:
            self._record(loss, None, f"not replaced yet, the others of {role} go on: {first_line(reason)}")
        self._delayed.add((role, rank))
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._delayed.discard((role, rank))

    def _record(self, loss: Loss, recovery_s: float | None, outcome: str) -> None:
        error = loss.error
        seconds = self.clock.now() - loss.since
        before_s = loss.recorded_s or 0.0
        loss.recorded_s = seconds
        work_again = loss.work_again
        loss.work_again = 0
        self.log.write({
            "role": error.role, "rank": error.rank, "incarnation": error.incarnation, "pid": loss.pid,
            "kind": error.kind, "method": error.method, "reason": str(error), "call_age_s": round(error.age_s, 3),
            "detection_s": loss.silent_s, "recovery_s": recovery_s, "outcome": outcome,
            "redispatched": work_again, "lost_at": self.log.wall_time(seconds),
        }, seconds_down=seconds - before_s)


async def _answers(call: Call) -> bool:
    try:
        await call.done()
    except WorkerError:
        return False
    return True


def _how(error: WorkerLost) -> str:
    return f"{error.kind if error.kind in ('died', 'hung', 'broke') else 'was given up'} in {error.method}"


def _described(loss: Loss) -> str:
    return first_line(loss.error).rstrip(".") + (f" (pid {loss.pid})" if loss.pid else "")
