"""A role under measurement, alone in its process: what it does at one response length, timed from inside.

Times are CPU time of the process. Its one computing thread never waits, so on a quiet machine that is wall time; on a
busy one it is nearer to it than wall time would be.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from benchmarks.growth.settings import CELL_S, LENGTHS, REPEATS, REPEATS_S, Size

Work = Callable[[], Any]
"""One repeat. Where only a part of it is meant, it returns that part's CPU seconds."""
Task = tuple[str, int]
"""An activity and a response length."""
ANY_LENGTH = 0
"""Stands for the length of activities that have none."""


class Role:
    """A side (see `benchmarks.side_process`) that does one task of `tasks` a turn, in order, and repeats it itself."""

    ACTIVITIES: ClassVar[tuple[str, ...]]
    ANY: ClassVar[tuple[str, ...]] = ()
    """Activities whose cost does not depend on the length."""

    def __init__(self, size: Size, directory: Path) -> None:
        torch.set_num_threads(1)
        self.size, self.directory = size, directory
        self.start()
        for activity in (*self.ACTIVITIES, *self.ANY):
            self.work(activity, LENGTHS[0], 1)()
        self._tasks: Iterator[Task] = iter(self.tasks())
        self._proof: list[float] = []
        self._before: tuple[Task, int, list[float]] = (("", ANY_LENGTH), 0, [])

    @classmethod
    def tasks(cls) -> list[Task]:
        """What is measured, shortest responses first."""
        return [*((a, length) for a in cls.ACTIVITIES for length in LENGTHS), *((a, ANY_LENGTH) for a in cls.ANY)]

    @classmethod
    def samples(cls, size: Size, task: Task) -> int:
        """Rows of one repeat; 1 where there are none."""
        activity, length = task
        return 1 if activity in cls.ANY else size.rows(length)

    def start(self) -> None:
        """Build the role."""
        raise NotImplementedError

    def work(self, activity: str, length: int, rows: int) -> Work:
        """One repeat, with what it needs made beforehand."""
        raise NotImplementedError

    def run(self) -> float:
        """Repeat the next task, unless it would take too long; returns samples of all repeats."""
        task = next(self._tasks)
        samples = self.samples(self.size, task)
        self._proof, seconds = [0.0, 1.0], []
        if self._expected_s(task, samples) <= CELL_S:
            work = self.work(task[0], task[1], samples)
            forget_peak()
            began, cpu_began = time.perf_counter(), time.process_time()
            seconds = repeated(work)
            share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
            self._proof = [peak_mib(), share, *seconds]
        self._before = (task, samples, seconds)
        return float(samples * len(seconds))

    def _expected_s(self, task: Task, samples: int) -> float:
        """What one repeat takes by the task before, in proportion to response tokens (attention grows faster, so this
        is too little rather than too much); no end of it after one that took too long, 0 where nothing is known."""
        (activity, length), known, seconds = self._before
        if activity != task[0]:
            return 0.0
        return median(seconds) * samples * task[1] / (known * length) if seconds else float("inf")

    def proof(self) -> list[float]:
        """Highest resident memory in MiB, CPU time over wall time, then seconds of each repeat: none where the task was
        skipped."""
        return self._proof


def repeated(work: Work) -> list[float]:
    """CPU seconds of up to `REPEATS` repeats; as the work tells them, where it does."""
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < REPEATS_S:
        began = time.process_time()
        told = work()
        seconds.append(told if isinstance(told, float) else time.process_time() - began)
    return seconds


def forget_peak() -> None:
    """Let the kernel count this process's highest resident memory from here on (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Highest resident memory since `forget_peak`."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
