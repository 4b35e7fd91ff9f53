"""Too little memory: workers that the kernel kills because of it, and a small /dev/shm."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from chaos.driver_under_test import DriverUnderTest
from chaos.evidence import Evidence, Outcome
from chaos.faults import KILL, Fault
from chaos.injection_log import InjectionLog
from chaos.kind import Kind, judged
from chaos.kinds.workers import LONG_CALL, LearnerFault, WorkerFault
from chaos.memory_groups import MemoryGroup, probe
from chaos.mounts import (
    SHARED_MEMORY,
    SMALL_SHARED_MEMORY_MB,
    USUAL_SHARED_MEMORY,
    probe_private_shared_memory,
    resize_shared_memory,
)
from chaos.requirements import Requirement
from chaos.run_record import RunRecord, Start

if TYPE_CHECKING:
    import psutil

    from rlhf_ray.workers.worker_group import WorkerGroup

MEMORY_GROUPS = Requirement("a control group with a memory limit", probe)
PRIVATE_SHARED_MEMORY = Requirement("a private /dev/shm", probe_private_shared_memory)
STARTED_S = 5.0
"""A driver starts within this time after its fault was injected."""
KILLED_S = 60.0
"""Within this time the victim must need memory."""
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class MemoryLimit(WorkerFault):
    """A worker in the middle of a call gets no more memory."""

    mechanism: str = "memory limit"
    signal: int = KILL
    requires: tuple[Any, ...] = (MEMORY_GROUPS,)

    async def hit(self, driver: DriverUnderTest, fault: Fault, group: WorkerGroup, process: psutil.Process) -> None:
        """Move it into a control group of its own."""
        memory = MemoryGroup.make()
        with suppress(OSError):  # it is gone
            memory.take(process.pid)
        driver.in_thread(_log_kill, driver.injections, fault, memory)

    def confirm(self, driver: DriverUnderTest, fault: Fault, process: psutil.Process) -> None:
        """By the kernel's count of kills."""

    def went_unnoticed(self, evidence: Evidence, injection: dict[str, Any]) -> bool:
        """A victim that needed no more memory before its driver ended was not killed."""
        killed = any(line["fault"] == injection["fault"] for line in evidence.record.injections.read("confirmed"))
        return not killed or super().went_unnoticed(evidence, injection)


@dataclass(frozen=True, kw_only=True)
class LearnersMemoryLimit(MemoryLimit, LearnerFault):
    """The same for a learner's rank."""

    async def hit(self, driver: DriverUnderTest, fault: Fault, group: WorkerGroup, process: psutil.Process) -> None:
        """Move it; all learners will be replaced."""
        await MemoryLimit.hit(self, driver, fault, group, process)
        driver.learners_lost = True


@dataclass(frozen=True, kw_only=True)
class SmallSharedMemory(Kind):
    """A driver finds a /dev/shm that is smaller than its object store: Ray's store is in a file elsewhere."""

    victim: str = "shared memory"
    mechanism: str = "small"
    state: str = "when a driver starts"
    requires: tuple[Any, ...] = (PRIVATE_SHARED_MEMORY,)

    colour: ClassVar[str] = "disturbance"
    follows_an_end: ClassVar[bool] = True

    def driver_starts(self, record: RunRecord, fault: Fault) -> None:
        """Make it small."""
        resize_shared_memory(f"{SMALL_SHARED_MEMORY_MB}m")
        total = shutil.disk_usage(SHARED_MEMORY).total >> 20
        record.injections.add("injected", fault=fault.number, kind=fault.kind, in_state=True,
                              state=f"{total} MiB, less than the object store")

    def driver_ended(self, record: RunRecord, start: Start, fault: Fault) -> None:
        """Make it large again."""
        resize_shared_memory(USUAL_SHARED_MEMORY)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """That driver must train."""
        began = evidence.next_loop(injection["time"])
        start = evidence.start_at(began) if began else None
        same = start is not None and abs(start.began - injection["time"]) < STARTED_S
        return judged(evidence, fault, injection, "" if same else "that driver did not begin to train")


def _log_kill(injections: InjectionLog, fault: Fault, memory: MemoryGroup) -> None:
    began = time.monotonic()
    try:
        while (seconds := time.monotonic() - began) < KILLED_S:
            if memory.kills:
                injections.add("confirmed", fault=fault.number, state="killed by the kernel", seconds=seconds)
                return
            time.sleep(POLL_S)
    finally:
        memory.remove()


KINDS = (
    MemoryLimit(name="generator_out_of_memory", words="a generator with requests in flight gets no more memory",
                victim="generator", role="generator", state="requests in flight", phase="generate", most_delay_s=0.1),
    LearnersMemoryLimit(name="policy_out_of_memory", words="a policy's rank gets no more memory in an update",
                        victim="policy_learner", role="policy_learner", state="update", phase="policy_update",
                        **LONG_CALL),  # type: ignore[arg-type]
    SmallSharedMemory(name="shm_small", words="a driver is started where /dev/shm is smaller than its object store"),
)
"""Kinds of this module."""
