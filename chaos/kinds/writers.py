"""Disks of which one writer at a time learns that they are full, or hang."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from chaos import preload
from chaos.driver_under_test import DriverUnderTest
from chaos.faults import Fault
from chaos.kinds.drivers import DISK_FULL, DriverEnd
from chaos.mounts import freeze, probe_freezing, thaw
from chaos.requirements import COMPILER, Requirement
from chaos.run_record import RunRecord, Start
from rlhf_ray.errors import CheckpointError, DiskStalled
from rlhf_ray.failpoints import FSYNC, VARIABLE

LONGEST_S = 240.0
"""The disk is no longer full after this time. The writer must have written by then."""
NOTICED_S = 40.0
"""A frozen disk is thawed so long after the run's own deadline. Until then the driver's process cannot end."""
FREEZING = Requirement("freezing a file system of its own", probe_freezing)
WRITERS = {
    "shard": ("checkpoints/.tmp-*/policy_learner/*", "a rank's part of a checkpoint"),
    "manifest": ("checkpoints/.tmp-*/*manifest.json*", "the manifest of a checkpoint"),
    "state": ("checkpoints/.tmp-*/*coordinator.json*", "the coordinator's part of a checkpoint"),
    "ledger": ("ledger.sqlite*", "the ledger"),
    "metrics": ("metrics.jsonl", "a row of metrics"),
    "samples": ("samples/*", "a file of samples"),
}
"""By name: files below the run's directory, as a shell pattern, and a description."""


@dataclass(frozen=True, kw_only=True)
class FullForWriter(DriverEnd):
    """No write to certain files succeeds, as on a full disk."""

    files: str
    mechanism: str = "full"
    state: str = "writing"
    requires: tuple[Any, ...] = (COMPILER,)

    exit_code: ClassVar[int] = CheckpointError.exit_code
    without_effect: ClassVar[str] = "no write failed"

    def environment(self, fault: Fault) -> dict[str, str]:
        """Load the library, in workers too."""
        return preload.environment()

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Let the writes fail."""
        library = preload.Preload.of_this_process()
        directory = Path(driver.coordinator.config.run.dir).resolve()
        driver.injected(fault, pid=os.getpid(), state=f"{self.files} cannot be written", library=str(library.path))
        library.fill_disk(f"{directory}/{self.files}", LONGEST_S)

    def driver_ended(self, record: RunRecord, start: Start, fault: Fault) -> None:
        """Log how many writes failed."""
        for line in record.injections.read("injected"):
            if line["fault"] == fault.number and (hits := preload.Preload(Path(line["library"])).hits):
                record.injections.add("confirmed", fault=fault.number, state=f"{hits} writes failed", seconds=0.0)

    def problem_with_output(self, log: str) -> str:
        """The driver must say that the disk is full."""
        if "Traceback" in log or not any(words in log for words in DISK_FULL):
            return "the driver does not report that the disk is full"
        return ""


@dataclass(frozen=True, kw_only=True)
class FullForExport(FullForWriter):
    """The same for what is written after the last update."""

    at_the_end: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class HungFile(DriverEnd):
    """The flush of one file hangs until the driver has ended."""

    file: str
    mechanism: str = "hangs"
    state: str = "flush"

    exit_code: ClassVar[int] = DiskStalled.exit_code

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Arm the failpoint."""
        driver.injected(fault, pid=os.getpid(), state=f"the next flush of {self.file} hangs")
        os.environ[VARIABLE] = f"{FSYNC}@{self.file}:hang"

    def problem_with_output(self, log: str) -> str:
        """The driver must name the file that hangs."""
        named = any("the disk of the run hangs" in line and self.file in line for line in log.splitlines())
        return "" if named else f"the driver does not report that the flush of {self.file} hangs"


@dataclass(frozen=True, kw_only=True)
class FrozenDisk(DriverEnd):
    """The file system of the run is frozen, and thawed some time after the run has noticed."""

    victim: str = "disk of the run"
    mechanism: str = "frozen"
    state: str = "training"
    requires: tuple[Any, ...] = (FREEZING,)

    own_disk: ClassVar[bool] = True
    exit_code: ClassVar[int] = DiskStalled.exit_code
    without_effect: ClassVar[str] = "the file system was not frozen"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Freeze it."""
        config = driver.coordinator.config
        driver.injected(fault, pid=os.getpid(), state="about to be frozen")
        await asyncio.to_thread(freeze, Path(config.run.dir), config.cluster.disk_timeout_s + NOTICED_S)
        driver.injections.add("confirmed", fault=fault.number, state="frozen", seconds=0.0)

    def driver_ended(self, record: RunRecord, start: Start, fault: Fault) -> None:
        """Thaw it, if that has not happened yet."""
        if any(line["fault"] == fault.number for line in record.injections.read("injected")):
            thaw(record.directory)

    def problem_with_output(self, log: str) -> str:
        """The driver must say that the disk hangs."""
        return "" if "the disk of the run hangs" in log else "the driver does not report that the disk hangs"


KINDS = (
    *(FullForWriter(name=f"full_at_{name}", words=f"the disk is full where {words} is written; --resume",
                    victim=words, files=files)
      for name, (files, words) in WRITERS.items()),
    FullForExport(name="full_at_export", words="the disk is full where the trained model is written; --resume",
                  victim="trained model", files=".tmp-model-*/*"),
    *(HungFile(name=f"hang_at_{name}", words=f"the disk hangs where {words} is flushed; --resume", victim=words,
               file=file) for name, file, words in (
        ("manifest", "manifest.json", "the manifest of a checkpoint"), ("metrics", "metrics.jsonl", "a row of metrics"),
        ("ledger", "ledger.sqlite", "the ledger"))),
    FrozenDisk(name="disk_frozen", words="the file system of the run is frozen for a time; --resume",
               runs={"overlapped": 1}),
)
"""Kinds of this module."""
