"""The workers of one role: a plain class made a Ray actor, spawned in its pool, called one by one or all together."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, overload

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_ray.cluster.processes import Processes, is_here, kill, kill_on_their_node
from rlhf_ray.cluster.resource_pools import Pools, Seat
from rlhf_ray.cluster.worker_environment import worker_environment
from rlhf_ray.cluster.worker_templates import template_command
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.errors import RLHFError
from rlhf_ray.workers.actor_class import MOST_CALLS, Process, actor_class, is_async
from rlhf_ray.workers.calls import AsyncMethod, Call, Deadline, Fence, Method, Result, Role, Startable, WorkerHandle
from rlhf_ray.workers.heartbeat import count_at, forget, key_of

KILLED_S = 2.0
"""Time for Ray to kill actors; Ray reports an actor that ends in another way as failed."""


class WorkerGroup(Generic[Role]):
    """All workers of one role."""

    def __init__(
        self,
        role: str,
        cls: type[Role],
        placement: PlacementConfig,
        pools: Pools,
        arguments: Callable[[int], Mapping[str, Any]],
        environment: Mapping[str, str],
        call_timeout_s: float,
        task_events: bool = False,
        section: str = "",
        libraries: Sequence[str] = (),
    ) -> None:
        """Spawn the workers. Returns at once; `start` is the first call that waits for them.

        Args:
            role: name in the dashboard; workers are called `role/rank`, later processes of a rank `role/rank (2)`.
            cls: the role's class.
            arguments: keyword arguments of the class for each rank.
            environment: variables of the worker processes, set before any import.
            task_events: let Ray keep a record of every call, which is a quarter of the driver's bytes. The step clock's
                `under_way` has the same information about the present.
            section: the configuration section that `placement` comes from, under which `pools` knows the role; the
                role's name when empty.
            libraries: modules that its workers import, for `worker_templates`; without any they import for themselves.
        """
        self.role = role
        self._section = section or role
        self.deadline = Deadline(call_timeout_s, "cluster.call_timeout_s")
        """Of a call that has none of its own."""
        self._class = actor_class(cls)
        self._placement = placement
        self._pools = pools
        self._concurrency = MOST_CALLS if is_async(cls) else 1
        self._task_events = task_events
        self._arguments = arguments
        self._environment = worker_environment(placement, environment)
        self._template = None
        if libraries and not placement.gpus:
            self._template = template_command(self._environment, libraries)
        self._workers = {rank: self._spawned(rank, 1) for rank in range(placement.workers)}
        self._former: dict[int, _Worker] = {}
        """Workers that were removed. A rank is never used again, so a new worker cannot be mistaken for an old one."""

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def ranks(self) -> list[int]:
        """Present ranks in order, with gaps where workers were removed."""
        return sorted(self._workers)

    def replica(self, rank: int) -> list[int]:
        """The ranks that hold one copy of the role's models together with `rank`, itself included. They make every call
        together, and are started together."""
        size = self._placement.replica_size
        first = rank - rank % size
        return list(range(first, first + size))

    def incarnation(self, rank: int) -> int:
        """Number of the rank's present process, counted from 1."""
        return self._worker(rank).fence.incarnation

    def handle(self, rank: int) -> WorkerHandle:
        """The handle to the rank's present process."""
        return self._worker(rank)

    def processes(self, rank: int) -> Processes | None:
        """The worker's processes as it reported them after its start, before that only its own; None before its first
        answer."""
        return self._worker(rank).processes

    def seat(self, rank: int) -> Seat:
        """Pool, bundle and placement group of the worker."""
        return self._pools.seat(self._section, rank, self._placement)

    async def start(self, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call every role's `start`; returns the results in rank order. Raises the same errors as `values`."""
        firsts = [rank for rank in self.ranks if rank == self.replica(rank)[0]]
        started = await asyncio.gather(*(self.start_replica(rank, *args, timeout_s=timeout_s) for rank in firsts))
        return [result for results in started for result in results]

    async def start_replica(self, rank: int, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """As `start`, for the ranks of a replica. If they are several, they also get an address at which to join, and
        how long to wait for each other, as further arguments."""
        ranks = self.replica(rank)
        if len(ranks) > 1:
            args = (*args, await self.rendezvous(ranks[0], timeout_s), self.deadline.seconds)
        return list(await asyncio.gather(*(self.start_one(each, *args, timeout_s=timeout_s) for each in ranks)))

    async def rendezvous(self, rank: int, timeout_s: float | None = None) -> str:
        """An address on a rank's node at which others can join it."""
        return await self.own_call(rank, Process.rendezvous, deadline=self._to_start(timeout_s)).value()

    async def start_one(self, rank: int, *args: Any, timeout_s: float | None = None) -> Any:
        """Call one role's `start`, record the worker's processes, so that they can be killed in any state, and start
        its heartbeat. Its own process is recorded first, in case it has to be killed while it starts."""
        worker = self._workers[rank]
        deadline = self._to_start(timeout_s)
        worker.processes = await self.own_call(rank, Process.own_processes, deadline=deadline).value()
        started = await self.call(rank, Startable.start, *args, deadline=deadline).value()
        key = key_of(self.role, rank, worker.fence.incarnation)
        worker.processes = await self.own_call(rank, Process.introduce, key, deadline=deadline).value()
        return started

    def _to_start(self, timeout_s: float | None) -> Deadline:
        return self.deadline if timeout_s is None else Deadline(timeout_s, "cluster.start_timeout_s")

    async def heartbeats(self, rank: int) -> int | None:
        """A number that grows while the rank's present process lives (see `heartbeat`); None before it has started."""
        return await count_at(key_of(self.role, rank, self.incarnation(rank)))

    def give_up(self, rank: int, reason: str) -> None:
        """Ignore the rank's present process from now on: calls in progress fail with `reason`, and late answers are
        refused."""
        self._worker(rank).fence.close(reason)

    async def respawn(self, rank: int, reason: str = "it was restarted") -> None:
        """Kill a rank's processes and spawn its successor in their place: the same class in the same pool with the same
        arguments, and an incarnation number one higher. The new worker is not started.

        Args:
            reason: the error message of calls in progress, and of calls to the old process.
        """
        old = self._workers[rank]
        await _ended(old, reason)
        await self._pools.leave_lost_nodes(self._section, rank, self._placement)
        if self._workers.get(rank) is old:
            self._workers[rank] = self._spawned(rank, old.fence.incarnation + 1)

    async def add(self, timeout_s: float) -> int:
        """Spawn one more worker with the next rank; the pool grows by a bundle when it is full. The worker is not
        started.

        Returns:
            its rank.

        Raises:
            ClusterError: the cluster has no free resources for it.
        """
        if not self._pools.has_room(self._placement):
            await self._pools.grow(self._placement.pool, timeout_s)
        rank = max((*self._workers, *self._former)) + 1
        self._workers[rank] = self._spawned(rank, 1)
        return rank

    async def remove(self, rank: int, reason: str, shutdown: "Method[Role, Any] | None" = None,
                     grace_s: float = 0.0) -> None:
        """End a worker permanently, and free its bundle.

        Args:
            reason: the error message of calls in progress.
            shutdown: a method that shuts the role down cleanly, within `grace_s`.
        """
        worker = self._workers[rank]
        if shutdown is not None and worker.fence.closed is None:
            with suppress(RLHFError):
                await self.call(rank, shutdown, deadline=Deadline(grace_s)).done()
        self._former[rank] = self._workers.pop(rank)
        await _ended(worker, reason)
        self._pools.leave(self._section, rank, self._placement)

    @overload
    def call(self, rank: int, method: AsyncMethod[Role, Result], *args: Any, outputs: int = 1,
             deadline: Deadline | None = None, ends_with_caller: bool = False, **named: Any) -> Call[Result]: ...

    @overload
    def call(self, rank: int, method: Method[Role, Result], *args: Any, outputs: int = 1,
             deadline: Deadline | None = None, **named: Any) -> Call[Result]: ...

    def call(self, rank: int, method: Any, *args: Any, outputs: int = 1, deadline: Deadline | None = None,
             ends_with_caller: bool = False, **named: Any) -> Call[Any]:
        """Call one worker. Object references among the arguments, and in lists of references, arrive as their values;
        results stay in the object store.

        Args:
            method: of the role's class.
            outputs: how many values the method returns as a tuple, each of which becomes an object of its own.
            deadline: the group's if None.
            ends_with_caller: `Call.end` ends the call at the worker; asynchronous methods only.
        """
        return self._worker(rank).call(method, *args, deadline=deadline or self.deadline, outputs=outputs,
                                       ends_with_caller=ends_with_caller, **named)

    @overload
    def own_call(self, rank: int, method: Callable[..., Coroutine[Any, Any, Result]], *args: Any, outputs: int = 1,
                 deadline: Deadline | None = None, **named: Any) -> Call[Result]: ...

    @overload
    def own_call(self, rank: int, method: Callable[..., Result], *args: Any, outputs: int = 1,
                 deadline: Deadline | None = None, **named: Any) -> Call[Result]: ...

    def own_call(self, rank: int, method: Any, *args: Any, outputs: int = 1, deadline: Deadline | None = None,
                 **named: Any) -> Call[Any]:
        """As `call`, for what a worker answers besides the methods of its role (`Process`)."""
        return self._worker(rank).call(method, *args, deadline=deadline or self.deadline, outputs=outputs, **named)

    @overload
    def call_all(self, method: AsyncMethod[Role, Result], *args: Any, deadline: Deadline | None = None,
                 **named: Any) -> list[Call[Result]]: ...

    @overload
    def call_all(self, method: Method[Role, Result], *args: Any, deadline: Deadline | None = None,
                 **named: Any) -> list[Call[Result]]: ...

    def call_all(self, method: Any, *args: Any, deadline: Deadline | None = None, **named: Any) -> list[Call[Any]]:
        """The same call to every worker, in rank order."""
        return [self.call(rank, method, *args, deadline=deadline, **named) for rank in self.ranks]

    @overload
    async def values(self, method: AsyncMethod[Role, Result], *args: Any, deadline: Deadline | None = None,
                     **named: Any) -> list[Result]: ...

    @overload
    async def values(self, method: Method[Role, Result], *args: Any, deadline: Deadline | None = None,
                     **named: Any) -> list[Result]: ...

    async def values(self, method: Any, *args: Any, deadline: Deadline | None = None, **named: Any) -> list[Any]:
        """The same call to every worker; returns the results in rank order. The first failure is raised."""
        calls = self.call_all(method, *args, deadline=deadline, **named)
        return list(await asyncio.gather(*(call.value() for call in calls)))

    def kill(self) -> None:
        """Kill the worker processes now, stopped ones too, and all processes that they have started."""
        here = [member for worker in self._workers.values() if worker.processes and is_here(worker.processes)
                for member in worker.processes.members]

        def end() -> None:
            for worker in self._workers.values():
                ray.kill(worker.actor)

        kill(here, KILLED_S, end)
        forget(self.role)

    def _worker(self, rank: int) -> "_Worker":
        """A rank's present process, or its last; calls to a last one fail like calls to a worker that was given up."""
        return self._workers.get(rank) or self._former[rank]

    def _spawned(self, rank: int, incarnation: int) -> "_Worker":
        seat = self.seat(rank)
        # Ray frees the name of a killed actor only some time later, so the next one has another name.
        name = f"{self.role}/{rank}" if incarnation == 1 else f"{self.role}/{rank} ({incarnation})"
        template = {} if self._template is None else {"py_executable": self._template}
        options = self._class.options(
            name=name,
            num_cpus=self._placement.cpus,
            num_gpus=self._placement.gpus,
            max_concurrency=self._concurrency,
            enable_task_events=self._task_events,
            scheduling_strategy=PlacementGroupSchedulingStrategy(seat.group, seat.slot),
            runtime_env={"env_vars": self._environment, **template},
        )
        return _Worker(self.role, rank, options.remote(**self._arguments(rank)), Fence(incarnation))


class _Worker(WorkerHandle):
    """A process that this group has spawned."""

    processes: Processes | None = None


async def _ended(worker: _Worker, reason: str) -> None:
    """Kill a worker's processes."""
    worker.fence.close(reason)
    if worker.processes is not None:  # before ray.kill, which would also kill the processes that clean up
        await kill_on_their_node(worker.processes)
    ray.kill(worker.actor)
