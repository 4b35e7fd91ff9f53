"""Worker groups without workers: plain coroutines behind the calling interface of `cluster.group.WorkerGroup`.

The coordinator's order of calls is what is tested with them; roles and engines have tests of their own. A call begins
at once, waits for the results that it was given by reference, and answers when its role's coroutine does.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from rlhf_ray.cluster.calls import Timing
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.files.thread import FileThread
from rlhf_ray.observability.spans import StepClock
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.ledger_tables import LedgerFacts

Behaviour = Callable[..., Awaitable[Any]]
"""Answers (rank, method, *arguments)."""


def ledger_of(config: PPOConfig, cursor: PromptCursor, directory: str, thread: FileThread | None = None) -> Ledger:
    """A real and empty ledger."""
    return Ledger.create(Path(directory) / "ledger.sqlite", LedgerFacts.of(config, cursor), thread=thread)


class StandInCall:
    """A call under way, awaited like `cluster.calls.Call`. It is also the reference to its own result."""

    def __init__(self, role: str, rank: int, method: str, behaviour: Behaviour, args: tuple[Any, ...]) -> None:
        self.role, self.rank, self.method, self.started = role, rank, method, time.monotonic()
        self._task = asyncio.ensure_future(self._run(behaviour, args))

    async def _run(self, behaviour: Behaviour, args: tuple[Any, ...]) -> Any:
        values = [await a._task if isinstance(a, StandInCall) else a for a in args]
        return await behaviour(self.rank, self.method, *values)

    @property
    def worker(self) -> str:
        return f"{self.role}/{self.rank}"

    @property
    def ref(self) -> "StandInCall":
        return self

    @property
    def refs(self) -> "tuple[StandInCall, ...]":
        return tuple(StandInPart(self, i) for i in range(self.outputs)) if self.outputs > 1 else (self,)

    outputs = 1

    async def done(self) -> Timing:
        await asyncio.shield(self._task)  # who waits no more leaves the worker at work
        return Timing(0.0)

    async def value(self, index: int = 0) -> Any:
        result = await asyncio.shield(self._task)
        return result[index] if isinstance(result, tuple) else result


class StandInPart(StandInCall):
    """One of the results of a call that has two."""

    def __init__(self, whole: StandInCall, index: int) -> None:
        self._task = asyncio.ensure_future(whole.value(index))


class StandInGroup:
    """`workers` ranks that all behave alike; `log` keeps (method, rank) in the order of calling."""

    def __init__(self, role: str, behaviour: Behaviour, workers: int = 1) -> None:
        self.role, self._behaviour, self._workers = role, behaviour, workers
        self.log: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return self._workers

    @property
    def ranks(self) -> list[int]:
        return list(range(self._workers))

    def processes(self, rank: int) -> None:
        return None

    def call(self, rank: int, method: str, *args: Any, outputs: int = 1, timeout_s: float | None = None) -> StandInCall:
        self.log.append((method, rank))
        call = StandInCall(self.role, rank, method, self._behaviour, args)
        call.outputs = outputs
        return call

    def call_all(self, method: str, *args: Any) -> list[StandInCall]:
        return [self.call(rank, method, *args) for rank in range(len(self))]

    async def values(self, method: str, *args: Any) -> list[Any]:
        return list(await asyncio.gather(*(call.value() for call in self.call_all(method, *args))))


class StandInPrompts:
    """A prompt source whose answer about a chunk is a name and the chunk's rows, and perhaps others, each once."""

    def __init__(self, name: str, rows: int = 0) -> None:
        self.name, self.rows = name, rows
        self.reads: list[list[int]] = []

    async def of(self, keys: list[Any]) -> Any:
        return await self.read(key.row for key in keys)

    async def read(self, rows: Iterable[int]) -> Any:
        self.reads.append(list(rows))
        return self.name, frozenset(self.reads[-1])


async def silent(rank: int, method: str, *args: Any) -> None:
    """Answers everything with None at once."""
    return


def role_groups_of(**behaviours: Behaviour | StandInGroup | None) -> RoleGroups:
    """A team whose groups behave as given, or are not there at all (None); the others are silent."""
    groups = {}
    for role in ("generators", "reference", "reward", "assembler", "policy", "critic"):
        given = behaviours.get(role, silent)
        groups[role] = given if isinstance(given, StandInGroup | None) else StandInGroup(role, given)
    return RoleGroups(**groups, clock=StepClock())
