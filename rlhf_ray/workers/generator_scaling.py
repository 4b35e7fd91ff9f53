"""Changes the number of generators during a run (`rlhf-ray scale`).

A new generator is started, receives the present weights, and only then gets prompts. A removed one gets no new prompts,
finishes its work, and is ended; work that it does not finish within `cluster.heartbeat_timeout_s` is repeated by
others. A sample has a seed of its own, so its result does not depend on the generator.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import ConfigError, RLHFError, WorkerError
from rlhf_ray.files.writer_thread import RunFiles
from rlhf_ray.roles.generator import Generator
from rlhf_ray.workers.calls import Deadline
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import GroupScheduler
from rlhf_ray.workers.role_groups import RoleGroups

REMOVED = "it was removed by rlhf-ray scale"
SHUTDOWN_GRACE_S = 10.0
"""Time for a generator to shut its engine down."""


class PublishedWeights(Protocol):
    """What a change of the number of generators needs of the publication of weights
    (`coordinator.weight_sync.WeightSync`)."""

    version: int
    """The newest published version."""

    async def catch_up(self, rank: int, readmit: Callable[[], None]) -> str:
        """Publish the present version to a generator that has just started, then readmit it."""

    async def over(self) -> None:
        """Wait until a publication under way, and the update before it, is over."""


class Scaling:
    """Changes the number of generators of a run; one request at a time."""

    def __init__(self, config: ClusterConfig, roles: RoleGroups, weights: PublishedWeights,
                 possible: Callable[[int], object], changed: Callable[[int], None], say: Callable[[str], None],
                 files: RunFiles | None = None) -> None:
        """
        Args:
            possible: raises a `ConfigError` if the configuration does not allow this number.
            changed: stores the new number; called in the thread for records.
            say: receives messages about the progress.
        """
        self._config = config
        self._roles = roles
        self._weights = weights
        self._possible = possible
        self._changed = changed
        self._say = say
        self._files = files or RunFiles()
        self._one_at_a_time = asyncio.Lock()

    async def asked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Handle a request of `rlhf-ray scale`, with the new number `generators`.

        Returns:
            their ranks, and a message.

        Raises:
            ConfigError: the number is invalid, or not possible in this run.
            ClusterError: the cluster lacks resources for them.
            WorkerError: one could not be started.
        """
        wanted = arguments.get("generators")
        if not isinstance(wanted, int) or wanted < 1:
            raise ConfigError(f"generators={wanted!r}: a run needs at least one generator; stop the run to end it")
        self._possible(wanted)
        async with self._one_at_a_time:
            group = self._roles.generators
            before = len(group)
            if wanted > before:
                await self._add(wanted - before)
            elif wanted < before:
                await self._remove(before - wanted)
            if wanted != before:
                await self._files.records.run(self._changed, wanted)
            change = f"{before} before, {len(group)} now" if wanted != before else f"{before}, as before"
            return {"generators": group.ranks, "message": f"generators: {change}"}

    async def _add(self, count: int) -> None:
        """Add all of them, or none."""
        group = self._roles.generators
        dispatcher = self._roles.dispatcher(group)
        ranks: list[int] = []
        try:
            while len(ranks) < count:
                ranks.append(await group.add(self._config.start_timeout_s))
            self._say(f"adding {_named(ranks)}")
            await _all(*(self._started(dispatcher, rank) for rank in ranks))
            self._say(f"{_named(ranks)} added, with version {self._weights.version} of the weights")
        except BaseException:
            for rank in ranks:
                dispatcher.scheduler.leave_out(rank)
            with self._roles.health.set_aside(group.role, ranks):
                await asyncio.gather(*(group.remove(rank, "it could not be added") for rank in ranks))
            raise

    async def _started(self, dispatcher: WorkerDispatcher, rank: int) -> None:
        """Start a new generator, send it the present weights, and make it available. From then on it is monitored like
        the others, even while more are starting."""
        with self._roles.health.set_aside(dispatcher.group.role, [rank]):
            await dispatcher.group.start_one(rank, timeout_s=self._config.start_timeout_s)
            await self._weights.catch_up(rank, lambda: dispatcher.scheduler.take_back(rank))

    async def _remove(self, count: int) -> None:
        group = self._roles.generators
        health = self._roles.health
        scheduler = self._roles.dispatcher(group).scheduler
        away = [rank for rank in group.ranks if (group.role, rank) in health.down]
        ranks = sorted((away + [rank for rank in reversed(group.ranks) if rank not in away])[:count])
        self._say(f"removing {_named(ranks)} after their work under way")
        for rank in ranks:
            scheduler.leave_out(rank)
        with health.set_aside(group.role, ranks):
            done = await asyncio.gather(*(self._retire(scheduler, rank) for rank in ranks))
        again = sum(done)
        self._say(f"{_named(ranks)} removed" + (f"; {again} samples are generated again by others" if again else ""))

    async def _retire(self, scheduler: GroupScheduler, rank: int) -> int:
        """End a generator that gets no more work; returns how many of its samples others must generate."""
        until = asyncio.get_running_loop().time() + self._config.heartbeat_timeout_s
        await scheduler.idle(rank, self._config.heartbeat_timeout_s)
        await self._warn_of_open_requests(scheduler, rank, max(0.0, until - asyncio.get_running_loop().time()))
        await self._weights.over()  # the next one begins without it
        left = scheduler.load(rank)
        await scheduler.group.remove(rank, REMOVED, shutdown=Generator.stop, grace_s=SHUTDOWN_GRACE_S)
        scheduler.notify()
        return left

    async def _warn_of_open_requests(self, scheduler: GroupScheduler, rank: int, wait_s: float) -> None:
        """Ask the engine itself, which episode runners call too: the driver hears of their calls later. What is open
        after `wait_s` seconds is generated again by others."""
        deadline = Deadline(wait_s + self._config.heartbeat_timeout_s, "cluster.heartbeat_timeout_s")
        asked = scheduler.group.call(rank, Generator.open_requests, wait_s, deadline=deadline)
        with suppress(RLHFError):  # it is down, and has none
            if still_open := await asked.value():
                self._say(f"generator/{rank} is removed with open requests, which others get again: {still_open}")


async def _all(*work: Any) -> None:
    """Wait for everything; then raise the first failure, as an error of this package."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, RLHFError):
            raise outcome
        if isinstance(outcome, BaseException):
            raise WorkerError(f"a generator could not be added: {type(outcome).__name__}: {outcome}") from outcome


def _named(ranks: list[int]) -> str:
    return ", ".join(f"generator/{rank}" for rank in ranks)
