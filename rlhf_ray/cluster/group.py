"""Plain classes made remote: the workers of one role, spawned into their pool, called one by one or together."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_ray.cluster.actor_class import CallSpec, actor_class, is_async, worker_environment
from rlhf_ray.cluster.beat import count_at, forget, place_of
from rlhf_ray.cluster.calls import Call, Fence
from rlhf_ray.cluster.pools import Pools, Seat
from rlhf_ray.cluster.processes import Processes, is_here, kill, kill_on_their_node
from rlhf_ray.cluster.shared_memory import removed_after
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.errors import RLHFError

KILLED_S = 2.0
"""What workers get to be ended by Ray, which reports those as failed that end in another way."""

LIMITS = {"start": "cluster.start_timeout_s", "introduce": "cluster.start_timeout_s",
          "finish_weights": "cluster.heartbeat_timeout_s", "load_weights": "cluster.heartbeat_timeout_s"}
"""Field of the configuration that bounds a method whose deadline is not that of any call."""


class WorkerGroup:
    """All workers of one role. A role is an ordinary class that knows nothing of Ray."""

    def __init__(
        self,
        role: str,
        cls: type,
        placement: PlacementConfig,
        pools: Pools,
        arguments: Callable[[int], Mapping[str, Any]],
        environment: Mapping[str, str],
        call_timeout_s: float,
        task_events: bool = False,
        section: str = "",
    ) -> None:
        """Spawn the workers. Returns at once; `start` is the first thing that waits for them.

        Args:
            role: name in the dashboard; workers are called `role/rank`, a rank's later processes `role/rank (2)`.
            cls: the role's class.
            arguments: keyword arguments of the class for each rank.
            environment: variables of the worker processes, set before they import anything.
            task_events: let Ray keep a record of every call: a quarter of the driver's bytes. The step clock's
                `under_way` says as much of the present.
            section: of the configuration that `placement` is, by which `pools` knows the role; the role's name if none.
        """
        self.role, self._section = role, section or role
        self.call_timeout_s = call_timeout_s
        self._class, self._placement, self._pools = actor_class(cls), placement, pools
        self._concurrency = 1000 if is_async(cls) else 1
        self._task_events = task_events
        self._arguments, self._environment = arguments, worker_environment(placement, environment)
        self._workers = {rank: self._spawned(rank, 1) for rank in range(placement.workers)}
        self._former: dict[int, _Worker] = {}
        """Those that were removed; a rank is never used again, so that nobody mistakes a new worker for an old one."""

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def ranks(self) -> list[int]:
        """Those that there are, in order; some are missing where workers were removed."""
        return sorted(self._workers)

    def incarnation(self, rank: int) -> int:
        """Which process of that rank is the present one, counted from 1."""
        return self._worker(rank).fence.incarnation

    def processes(self, rank: int) -> Processes | None:
        """The worker's processes, as it named them when it had started, before that its own; None before its first
        answer."""
        return self._worker(rank).processes

    def seat(self, rank: int) -> Seat:
        """Where in the cluster the worker lives."""
        return self._pools.seat(self._section, rank, self._placement)

    async def start(self, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call every role's `start`; what they return, in rank order. Same errors as `values`."""
        return list(await asyncio.gather(*(self.start_one(rank, *args, timeout_s=timeout_s)
                                           for rank in self.ranks)))

    async def start_one(self, rank: int, *args: Any, timeout_s: float | None = None) -> Any:
        """Call one role's `start`, note its processes, so that they can be killed whatever state they are in, and have
        it give signs of life. Its own process is known before, in case it is ended while it starts."""
        worker = self._workers[rank]
        worker.processes = await self.call(rank, "own_processes", timeout_s=timeout_s).value()
        started = await self.call(rank, "start", *args, timeout_s=timeout_s).value()
        place = place_of(self.role, rank, worker.fence.incarnation)
        processes = self.call(rank, "introduce", place, timeout_s=timeout_s)
        worker.processes = await processes.value()
        return started

    async def sign_of_life(self, rank: int) -> int | None:
        """A number that grows while the rank's present process lives (see `beat`); None before it has started."""
        return await count_at(place_of(self.role, rank, self.incarnation(rank)))

    def give_up(self, rank: int, reason: str) -> None:
        """Wait for no answer of a rank's present process any more, and refuse those that come: calls under way fail
        with `reason`."""
        self._worker(rank).fence.close(reason)

    async def respawn(self, rank: int, reason: str = "it was restarted") -> None:
        """End a rank's processes for certain, and spawn its successor in their place: the same class in the same pool
        with the same arguments, whose incarnation is one more. It is not started.

        Args:
            reason: what calls under way, and calls to the old process, fail with.
        """
        old = self._workers[rank]
        await _ended(old, reason)
        await self._pools.leave_lost_nodes(self._section, rank, self._placement)
        if self._workers.get(rank) is old:
            self._workers[rank] = self._spawned(rank, old.fence.incarnation + 1)

    async def add(self, timeout_s: float) -> int:
        """Spawn one worker more, of the next rank; the pool grows by a bundle where it has no room. It is not started.

        Returns:
            its rank.

        Raises:
            ClusterError: the cluster has no room for it.
        """
        if not self._pools.has_room(self._placement):
            await self._pools.grow(self._placement.pool, timeout_s)
        rank = max((*self._workers, *self._former)) + 1
        self._workers[rank] = self._spawned(rank, 1)
        return rank

    async def remove(self, rank: int, reason: str, goodbye: str | None = None, patience_s: float = 0.0) -> None:
        """End a worker for good, and give back its place.

        Args:
            reason: what calls under way fail with.
            goodbye: a method that lets it end in good order, within `patience_s`.
        """
        worker = self._workers[rank]
        if goodbye is not None and worker.fence.closed is None:
            with suppress(RLHFError):
                await self.call(rank, goodbye, timeout_s=patience_s).done()
        self._former[rank] = self._workers.pop(rank)
        await _ended(worker, reason)
        self._pools.leave(self._section, rank, self._placement)

    def call(self, rank: int, method: str, *args: Any, outputs: int = 1, timeout_s: float | None = None) -> Call:
        """Call one worker. Object references among `args` arrive as their values; results stay in the store.

        Args:
            outputs: how many values the method returns as a tuple, each to become an object of its own.
            timeout_s: deadline, where it is another than the group's.
        """
        worker, spec = self._worker(rank), CallSpec.of(method, outputs, args)
        *refs, timing = worker.timed_call(outputs + 1).remote(
            spec, *(arg for arg in args if isinstance(arg, ray.ObjectRef)))
        if timeout_s is None:
            return Call(self.role, rank, method, tuple(refs), timing, self.call_timeout_s, time.monotonic(),
                        worker.fence)
        return Call(self.role, rank, method, tuple(refs), timing, timeout_s, time.monotonic(), worker.fence,
                    LIMITS.get(method, ""))

    def call_all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Call]:
        """The same call to every worker, in rank order."""
        return [self.call(rank, method, *args, timeout_s=timeout_s) for rank in self.ranks]

    async def values(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """The same call to every worker; their results in rank order. The first failure is raised."""
        calls = self.call_all(method, *args, timeout_s=timeout_s)
        return list(await asyncio.gather(*(call.value() for call in calls)))

    def kill(self) -> None:
        """End the worker processes now, stopped ones too, with all that they have started."""
        here = [member for worker in self._workers.values() if worker.processes and is_here(worker.processes)
                for member in worker.processes.members]
        with removed_after(here):  # Ray ends those that would tidy up, too
            for worker in self._workers.values():
                ray.kill(worker.handle)
            kill(here, patience_s=KILLED_S)
        forget(self.role)

    def _worker(self, rank: int) -> "_Worker":
        """A rank's present process, or its last; calls to that fail as to any that was given up."""
        return self._workers.get(rank) or self._former[rank]

    def _spawned(self, rank: int, incarnation: int) -> "_Worker":
        seat = self.seat(rank)
        # Ray frees the name of a killed actor some time later, so the next one has another.
        name = f"{self.role}/{rank}" if incarnation == 1 else f"{self.role}/{rank} ({incarnation})"
        options = self._class.options(
            name=name,
            num_cpus=self._placement.cpus,
            num_gpus=self._placement.gpus,
            max_concurrency=self._concurrency,
            enable_task_events=self._task_events,
            scheduling_strategy=PlacementGroupSchedulingStrategy(seat.group, seat.slot),
            runtime_env={"env_vars": self._environment},
        )
        return _Worker(options.remote(**self._arguments(rank)), Fence(incarnation))


class _Worker:
    """One process of a rank."""

    def __init__(self, handle: Any, fence: Fence) -> None:
        self.handle, self.fence = handle, fence
        self.processes: Processes | None = None
        self._methods: dict[int, Any] = {}

    def timed_call(self, returns: int) -> Any:
        """The worker's one method, with options that Ray checks but once."""
        if returns not in self._methods:
            self._methods[returns] = self.handle.timed_call.options(num_returns=returns)
        return self._methods[returns]


async def _ended(worker: _Worker, reason: str) -> None:
    """End a worker's processes for certain."""
    worker.fence.close(reason)
    if worker.processes is not None:  # before Ray does: it would kill what cleans up after them, too
        await kill_on_their_node(worker.processes)
    ray.kill(worker.handle)
