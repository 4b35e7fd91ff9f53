"""Worker groups without workers: coroutines behind the calling interface of `workers.worker_group.WorkerGroup`.

They test the coordinator's order of calls; roles and engines have tests of their own. A call begins at once, waits for
the results that it is given by reference, and answers when its role's coroutine does.
"""

import asyncio
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.coordinator_groups import Answer, LocalGroup
from rlhf_ray.config.derived import derive
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.chunk_calls import ChunkCalls
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.workers.calls import Call, Deadline
from rlhf_ray.workers.health_monitor import HealthMonitor
from rlhf_ray.workers.role_groups import RoleGroups

FOREVER_S = 1e9


def ledger_of(config: PPOConfig, cursor: PromptCursor, directory: str, thread: FileThread | None = None) -> Ledger:
    """A real and empty ledger."""
    return Ledger.create(Path(directory) / "ledger.sqlite", LedgerFacts.of(config.coordinator, cursor), thread=thread)


class SharedRef:
    """Stands for a `ray.ObjectRef`: a wait for it that is given up ends neither the call nor another wait."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._future).__await__()


class StandInGroup(LocalGroup):
    """`workers` ranks whose calls `answer` answers; `log` has (method, rank) in the order of calling. Calls have no
    deadline but the one that they are given."""

    def __init__(self, role: str, answer: Answer, workers: int = 1) -> None:
        super().__init__(role, workers, answer)
        self.log: list[tuple[str, int]] = []

    def call(self, rank: int, method: Any, *args: Any, outputs: int = 1, deadline: Deadline | None = None,
             ends_with_caller: bool = False, **named: Any) -> Call[Any]:
        self.log.append((method.__name__, rank))
        call = super().call(rank, method, *args, outputs=outputs, deadline=deadline or Deadline(FOREVER_S),
                            ends_with_caller=ends_with_caller, **named)
        return replace(call, refs=tuple(map(SharedRef, call.refs)), timing=SharedRef(call.timing))


class StandInPrompts:
    """A prompt source whose answer about a chunk is a name and the chunk's rows, and perhaps others, each once."""

    chat = False

    def __init__(self, name: str, rows: int = 0) -> None:
        self.name, self.rows, self.numbers = name, rows, range(rows)
        self.reads: list[list[int]] = []

    async def read_for(self, keys: list[Any]) -> Any:
        return await self.read(key.row for key in keys)

    async def read(self, rows: Iterable[int]) -> Any:
        self.reads.append(list(rows))
        return self.name, frozenset(self.reads[-1])


async def silent(rank: int, method: str, *args: Any, **named: Any) -> None:
    """Answers everything with None at once."""
    return


def calls_of(config: PPOConfig, roles: RoleGroups) -> ChunkCalls:
    """The calls of a run with this configuration."""
    return ChunkCalls(roles, derive(config))


def role_groups_of(health: HealthMonitor | None = None, **answers: Answer | StandInGroup | None) -> RoleGroups:
    """Groups that answer as given, or that are absent (None); the others answer None."""
    groups = {}
    for role in ("generators", "reference", "reward", "assembler", "policy", "critic"):
        given = answers.get(role, silent)
        section = "generator" if role == "generators" else role
        if given is not None:
            groups[section] = given if isinstance(given, StandInGroup) else StandInGroup(role, given)
    return RoleGroups(groups, health=health or HealthMonitor())
