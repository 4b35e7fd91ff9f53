"""Worker groups whose many ranks are stand-ins: in this process, or in a few Ray actors."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.coordinator_stubs import StubRoles
from rlhf_ray.workers.calls import Call, Deadline
from rlhf_ray.workers.worker_group import WorkerGroup

Answer = Callable[..., Awaitable[Any]]
"""Answers a call: (rank, name of the method, *arguments, **named)."""


class StubGroup:
    """What a `WorkerGroup` offers the coordinator, for `workers` ranks of one role."""

    def __init__(self, role: str, workers: int) -> None:
        self.role, self.workers = role, workers

    def __len__(self) -> int:
        return self.workers

    @property
    def ranks(self) -> list[int]:
        """As `WorkerGroup.ranks`."""
        return list(range(len(self)))

    def call(self, rank: int, method: Any, *args: Any, outputs: int = 1, deadline: Deadline | None = None,
             ends_with_caller: bool = False, **named: Any) -> Call[Any]:
        """As `WorkerGroup.call`."""
        raise NotImplementedError

    def replica(self, rank: int) -> list[int]:
        """As `WorkerGroup.replica`: stand-ins hold no models."""
        return [rank]

    def incarnation(self, rank: int) -> int:
        """As `WorkerGroup.incarnation`: stand-ins do not die."""
        return 1

    def processes(self, rank: int) -> None:
        """As `WorkerGroup.processes`: ranks have none of their own."""

    async def heartbeats(self, rank: int) -> None:
        """As `WorkerGroup.heartbeats`: nothing is known of ranks without a process."""

    def call_all(self, method: Any, *args: Any, deadline: Deadline | None = None, **named: Any) -> list[Call[Any]]:
        """As `WorkerGroup.call_all`."""
        return [self.call(rank, method, *args, deadline=deadline, **named) for rank in range(len(self))]

    async def values(self, method: Any, *args: Any, deadline: Deadline | None = None, **named: Any) -> list[Any]:
        """As `WorkerGroup.values`."""
        return list(await asyncio.gather(*(call.value() for call in self.call_all(method, *args, **named))))


class HostedGroup(StubGroup):
    """Ranks that live in a few Ray actors: every call is a real one, and only the processes are fewer."""

    def __init__(self, role: str, workers: int, hosts: WorkerGroup[StubRoles]) -> None:
        super().__init__(role, workers)
        self._hosts = hosts

    def call(self, rank: int, method: Any, *args: Any, outputs: int = 1, deadline: Deadline | None = None,
             ends_with_caller: bool = False, **named: Any) -> Call[Any]:
        """Through the real group of hosts."""
        host = rank % len(self._hosts)
        stub = getattr(StubRoles, method.__name__)
        call = self._hosts.call(host, stub, rank, *args, outputs=outputs, deadline=deadline,
                                ends_with_caller=ends_with_caller, **named)
        return replace(call, role=self.role, rank=rank)


class LocalGroup(StubGroup):
    """Ranks in this process: a call is a task of the event loop, and a future stands for each object reference."""

    def __init__(self, role: str, workers: int, answer: Answer) -> None:
        """`answer` runs when a call's arguments are there; a call with several outputs returns as many values."""
        super().__init__(role, workers)
        self.answer, self._under_way = answer, set[asyncio.Task[None]]()

    def call(self, rank: int, method: Any, *args: Any, outputs: int = 1, deadline: Deadline | None = None,
             ends_with_caller: bool = False, **named: Any) -> Call[Any]:
        """Begin the call; its futures are resolved as Ray resolves references."""
        call, task = self._begun(self.answer, rank, method.__name__, outputs, deadline or Deadline(1800.0), args, named)

        async def end(*_: Any) -> None:
            task.cancel()
            await asyncio.wait([task])

        def ending(within: Deadline) -> Call[None]:
            return self._begun(end, rank, "end_call", 1, within, (), {})[0]

        return replace(call, ending=ending) if ends_with_caller else call

    def _begun(self, answer: Answer, rank: int, method: str, outputs: int, deadline: Deadline, args: Any,
               named: Mapping[str, Any]) -> tuple[Call[Any], "asyncio.Task[None]"]:
        loop = asyncio.get_running_loop()
        results = tuple(loop.create_future() for _ in range(outputs + 1))
        task = loop.create_task(self._run(results, answer, rank, method, args, named))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return Call(self.role, rank, method, results[:-1], results[-1], deadline, loop.time()), task

    async def _run(
        self, results: tuple[asyncio.Future[Any], ...], answer: Answer, rank: int, method: str, args: Any,
        named: Mapping[str, Any],
    ) -> None:
        began = asyncio.get_running_loop().time()
        try:
            values = [await _value(argument) for argument in args]
            by_name = {name: await _value(argument) for name, argument in named.items()}
            result = await answer(rank, method, *values, **by_name)
        except Exception as error:
            for future in results:
                future.set_exception(error)
                future.exception()  # not every result is waited for
            return
        timing = asyncio.get_running_loop().time() - began
        for future, value in zip(results, (*result, timing) if len(results) > 2 else (result, timing), strict=True):
            future.set_result(value)


async def _value(argument: Any) -> Any:
    """What a worker receives: values in place of references, also of a list of them."""
    if isinstance(argument, list):
        return [await _value(part) for part in argument]
    return await argument if isinstance(argument, Awaitable) else argument
