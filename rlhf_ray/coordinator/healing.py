"""Lost workers are replaced while the others go on: killed for certain, spawned, started, readmitted.

`WorkerDispatcher.ask` repeats the calls that were under way on other workers at once. Learners are not replaced one by
one: their state is spread over all of them.
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
"""Makes a worker that has just started what the others are, and readmits it by calling the second argument at a moment
of its choice. Returns what the worker has now, in words, or nothing."""


async def as_started(_: int, readmit: Callable[[], None]) -> str:
    """For workers that are ready when they have started."""
    readmit()
    return ""


@dataclass
class Loss:
    """One worker that is down."""

    error: WorkerLost
    """How it was found out."""
    since: float
    """By the step clock."""
    silent_s: float | None
    """For how long it had given no sign of life, where that is how it was found out."""
    pid: int | None
    work_again: int = 0
    """Of its calls, made again by others: samples for a generator, else calls."""
    told: bool = False
    """Whether it is in the log how it ended."""


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
        """Worker -> (restarts in a row, calls it had completed at the last of them)."""
        self.down: dict[tuple[str, int], Loss] = {}
        """Workers that are being replaced, by (role, rank)."""

    def look_after(self, dispatcher: WorkerDispatcher, ready: Ready = as_started) -> None:
        """Replace a dispatcher's workers from now on when they are lost."""
        self._ready[dispatcher.group.role], self._dispatchers[dispatcher.group.role] = ready, dispatcher
        dispatcher.on_lost = self.lost

    def lost(
        self, dispatcher: WorkerDispatcher, error: WorkerLost, work: int = 0, silent_s: float | None = None
    ) -> None:
        """A worker is lost; many may notice, and once is enough. Returns at once.

        Args:
            work: what the one who noticed gives to others.
            silent_s: for how long the worker gave no sign of life, if that is how it was noticed.
        """
        role, rank, group = dispatcher.group.role, error.rank, dispatcher.group
        if (role, rank) in self._aside or rank not in group.ranks:
            if rank in group.ranks:
                group.give_up(rank, str(error))
        elif error.incarnation != group.incarnation(rank):
            pass  # its successor is there already
        elif (role, rank) in self.down:
            group.give_up(rank, str(error))  # it may be the successor, which hangs before it is back
        else:
            processes = group.processes(rank)
            self.down[role, rank] = Loss(error, dispatcher.now(), silent_s, processes.pid if processes else None)
            dispatcher.leave_out(rank)
            group.give_up(rank, str(error))
            self.log.lost(f"{_described(self.down[role, rank])}; it is restarted"
                          + ("" if dispatcher.scheduler.any_up else ", and there is no other meanwhile"))
            task = asyncio.create_task(self._bring_back(dispatcher, rank), name=f"healing of {role}/{rank}")
            self._tasks.add(task)
            self._bringing_back[role, rank] = task
            task.add_done_callback(self._tasks.discard)
        if (role, rank) in self.down:
            self.down[role, rank].work_again += work

    @contextmanager
    def set_aside(self, dispatcher: WorkerDispatcher, ranks: Iterable[int]) -> Iterator[None]:
        """Replace none of these meanwhile: workers that come, whom nobody needs yet, or that are about to go. Those
        that are being replaced are left as they are."""
        members = {(dispatcher.group.role, rank) for rank in ranks}
        self._aside |= members
        try:
            for member in members & self.down.keys():
                self._bringing_back[member].cancel()
                loss = self.down.pop(member)
                self._record(dispatcher, loss, None, "it was removed before it was back")
            yield
        finally:
            self._aside -= members

    @asynccontextmanager
    async def at_work(self, watch: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Let `watch` go on meanwhile, and leave nothing under way afterwards: workers are about to be dismissed."""
        try:
            async with background_task("the watch over workers", watch, self.log.failed, essential=True):
                yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for (role, _), loss in self.down.items():
                if not loss.told:
                    self._record(self._dispatchers[role], loss, None, "the run ended before it was back")

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
        """Restart a worker until it stays, as often as is allowed; else what to say of that."""
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
        """Count a restart; false when there were too many since the worker's last answer."""
        completed = dispatcher.finished[rank]
        strikes, before = self._strikes.get((dispatcher.group.role, rank), (0, completed))
        strikes = strikes + 1 if before == completed else 1
        self._strikes[dispatcher.group.role, rank] = strikes, completed
        return strikes <= self._config.max_restarts

    def _record(self, dispatcher: WorkerDispatcher, loss: Loss, recovery_s: float | None, outcome: str) -> None:
        error, loss.told = loss.error, True
        self.log.write({
            "role": error.role, "rank": error.rank, "incarnation": error.incarnation, "pid": loss.pid,
            "kind": error.kind, "method": error.method, "reason": str(error), "call_age_s": round(error.age_s, 3),
            "detection_s": loss.silent_s, "recovery_s": recovery_s, "outcome": outcome,
            "redispatched": loss.work_again, "lost_at": self.log.wall_time(dispatcher.now() - loss.since),
        }, seconds_down=dispatcher.now() - loss.since)

    def status(self, now: float) -> list[dict[str, Any]]:
        """One line per worker that is down: who, how it was lost, and for how long, in seconds."""
        return [{"worker": loss.error.worker, "lost": _how(loss.error), "seconds": round(now - loss.since, 1)}
                for loss in self.down.values()]


def _how(error: WorkerLost) -> str:
    return f"{error.kind if error.kind in ('died', 'hung', 'broke') else 'was given up'} in {error.method}"


def _described(loss: Loss) -> str:
    return first_line(loss.error).rstrip(".") + (f" (pid {loss.pid})" if loss.pid else "")
