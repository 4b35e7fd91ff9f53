"""Replacement of lost workers while the others continue: killed, spawned, started, readmitted.

`WorkerDispatcher.call` repeats interrupted calls on other workers immediately. Learners are not replaced one by one,
because their state is sharded over all of them.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator.dispatcher import WorkerDispatcher
from rlhf_ray.errors import RLHFError, WorkerError, WorkerLost, first_line
from rlhf_ray.observability.background_task import background_task
from rlhf_ray.observability.faults import FaultLog
from rlhf_ray.observability.progress import duration

Ready = Callable[[int, Callable[[], None]], Awaitable[str]]
"""Brings a worker that has just started to the state of the others, and readmits it by calling the second argument.
Returns the worker's state in words, or an empty string."""


async def as_started(_: int, readmit: Callable[[], None]) -> str:
    """`Ready` of workers that need no more than their start."""
    readmit()
    return ""


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
    """Work repeated by other workers: samples for generators, otherwise calls."""
    recorded: bool = False
    """Whether its end is in the log."""


class Healing:
    """Replaces lost workers. A worker that is lost repeatedly without completing a call ends the run."""

    def __init__(self, config: ClusterConfig | None = None, log: FaultLog | None = None) -> None:
        self._config, self.log = config or ClusterConfig(), log or FaultLog()
        self._ready: dict[str, Ready] = {}
        self._dispatchers: dict[str, WorkerDispatcher] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._bringing_back: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._aside: set[tuple[str, int]] = set()
        self._strikes: dict[tuple[str, int], tuple[int, int]] = {}
        """Worker -> (consecutive restarts, calls that it had completed at the last one)."""
        self.down: dict[tuple[str, int], Loss] = {}
        """Workers that are being replaced, by (role, rank)."""

    def look_after(self, dispatcher: WorkerDispatcher, ready: Ready = as_started) -> None:
        """From now on, replace a dispatcher's workers when they are lost."""
        self._ready[dispatcher.group.role], self._dispatchers[dispatcher.group.role] = ready, dispatcher
        dispatcher.on_lost = self.lost

    def lost(
        self, dispatcher: WorkerDispatcher, error: WorkerLost, work: int = 0, silent_s: float | None = None
    ) -> None:
        """Start the replacement of a lost worker; later reports of the same loss change nothing. Does not block.

        Args:
            work: repeated by another worker because of the loss.
            silent_s: seconds without a sign of life, if the loss was detected by them.
        """
        role, rank, group = dispatcher.group.role, error.rank, dispatcher.group
        if (role, rank) in self._aside or rank not in group.ranks:
            if rank in group.ranks:
                group.give_up(rank, str(error))
        elif error.incarnation != group.incarnation(rank):
            pass  # it was replaced already
        elif (role, rank) in self.down:
            group.give_up(rank, str(error))  # the new worker may hang before it is readmitted
        else:
            processes = group.processes(rank)
            self.down[role, rank] = Loss(error, dispatcher.now(), silent_s, processes.pid if processes else None)
            dispatcher.leave_out(rank)
            group.give_up(rank, str(error))
            self.log.lost(f"{_described(self.down[role, rank])}; it is restarted"
                          + ("" if dispatcher.scheduler.any_up else ", and no other worker is available meanwhile"))
            task = asyncio.create_task(self._bring_back(dispatcher, rank), name=f"healing of {role}/{rank}")
            self._tasks.add(task)
            self._bringing_back[role, rank] = task
            task.add_done_callback(self._tasks.discard)
        if (role, rank) in self.down:
            self.down[role, rank].work_again += work

    @contextmanager
    def set_aside(self, dispatcher: WorkerDispatcher, ranks: Iterable[int]) -> Iterator[None]:
        """Replace none of these workers during the enclosed work, because they are being added or removed. Replacements
        under way are cancelled."""
        members = {(dispatcher.group.role, rank) for rank in ranks}
        self._aside |= members
        try:
            for member in members & self.down.keys():
                self._bringing_back[member].cancel()
                loss = self.down.pop(member)
                self._record(dispatcher, loss, None, "it was removed before its restart was complete")
            yield
        finally:
            self._aside -= members

    @asynccontextmanager
    async def at_work(self, watch: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Run `watch` during the enclosed work; afterwards cancel all replacements, because the workers are about to be
        stopped."""
        try:
            async with background_task("the watch over workers", watch, self.log.failed, essential=True):
                yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for (role, _), loss in self.down.items():
                if not loss.recorded:
                    self._record(self._dispatchers[role], loss, None, "the run ended before its restart was complete")

    async def _bring_back(self, dispatcher: WorkerDispatcher, rank: int) -> None:
        loss = self.down[dispatcher.group.role, rank]
        try:
            error: RLHFError | None = await self._restarted(dispatcher, rank, loss.error)
        except RLHFError as other:
            error = other
        except Exception as bug:
            error = WorkerError(f"{dispatcher.group.role}/{rank} cannot be restarted: {type(bug).__name__}: {bug}")
        if error is not None:
            dispatcher.fail(error)
            self._record(dispatcher, loss, None, str(error))

    async def _restarted(self, dispatcher: WorkerDispatcher, rank: int, error: WorkerLost) -> WorkerError | None:
        """Restart a worker, again if it is lost meanwhile; returns an error after too many restarts."""
        while self._may_restart(dispatcher, rank):
            try:
                await self._restart(dispatcher, rank, str(error))
                return None
            except WorkerLost as again:
                error = again
        message = (f"{error.worker} was lost once more after {self._config.max_restarts} restarts "
                   f"(cluster.max_restarts) without completing a call in between: {error}")
        return WorkerError(message, error.role)

    async def _restart(self, dispatcher: WorkerDispatcher, rank: int, reason: str) -> None:
        group, loss = dispatcher.group, self.down[dispatcher.group.role, rank]
        await group.respawn(rank, reason)
        await group.start_one(rank, timeout_s=self._config.start_timeout_s)

        def readmit() -> None:
            del self.down[group.role, rank]
            dispatcher.take_back(rank)

        has = await self._ready[group.role](rank, readmit)
        seconds = dispatcher.now() - loss.since
        self._record(dispatcher, loss, seconds, has)
        self.log.back(f"{group.role}/{rank} is back after {duration(seconds)}" + (f", {has}" if has else ""))

    def _may_restart(self, dispatcher: WorkerDispatcher, rank: int) -> bool:
        """Count a restart; False if there were too many since the worker last completed a call."""
        completed = dispatcher.finished[rank]
        strikes, before = self._strikes.get((dispatcher.group.role, rank), (0, completed))
        strikes = strikes + 1 if before == completed else 1
        self._strikes[dispatcher.group.role, rank] = strikes, completed
        return strikes <= self._config.max_restarts

    def _record(self, dispatcher: WorkerDispatcher, loss: Loss, recovery_s: float | None, outcome: str) -> None:
        error, loss.recorded = loss.error, True
        self.log.write({
            "role": error.role, "rank": error.rank, "incarnation": error.incarnation, "pid": loss.pid,
            "kind": error.kind, "method": error.method, "reason": str(error), "call_age_s": round(error.age_s, 3),
            "detection_s": loss.silent_s, "recovery_s": recovery_s, "outcome": outcome,
            "redispatched": loss.work_again, "lost_at": self.log.wall_time(dispatcher.now() - loss.since),
        }, seconds_down=dispatcher.now() - loss.since)

    def status(self, now: float) -> list[dict[str, Any]]:
        """One line per worker that is being replaced: its name, how it was lost, and seconds since then."""
        return [{"worker": loss.error.worker, "lost": _how(loss.error), "seconds": round(now - loss.since, 1)}
                for loss in self.down.values()]


def _how(error: WorkerLost) -> str:
    return f"{error.kind if error.kind in ('died', 'hung', 'broke') else 'was given up'} in {error.method}"


def _described(loss: Loss) -> str:
    return first_line(loss.error).rstrip(".") + (f" (pid {loss.pid})" if loss.pid else "")
