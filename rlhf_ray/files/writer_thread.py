"""Threads that write a run's files in order, and the deadline on their progress.

A system call that waits for a disk cannot be cancelled, so a disk that hangs blocks the thread that made it. During a
run no other thread of the driver accesses the run's files: event loop, signals and exit do not depend on the disk
(these threads are daemons, which Python does not wait for).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rlhf_ray.errors import DiskStalled
from rlhf_ray.failpoints import hanging
from rlhf_ray.files.fsync import Progress, work_for

T = TypeVar("T")
LOOK_S = 0.5
"""Longest pause between two checks of a thread's progress."""
SUSPENDED_S = 5.0
"""If the checks were interrupted for longer, this process was suspended, and its threads with it."""
HURRY_S = 5.0
"""Deadline of a disk without progress once the run shall end at once."""


class ProgressDeadline:
    """A deadline that restarts with every sign of progress."""

    def __init__(self, timeout_s: float, now: Callable[[], float]) -> None:
        self.timeout_s, self._now = timeout_s, now
        self._seen: Any = None
        self._since = now()

    def exclude(self, seconds: float) -> None:
        """Do not count this time: the process was suspended."""
        self._since += seconds

    def check(self, moved: Any, doing: str) -> None:
        """Compare with the last check.

        Args:
            moved: any value that changes with progress.
            doing: the operation under way, for the message.

        Raises:
            DiskStalled: nothing has changed for `timeout_s`.
        """
        if moved != self._seen:
            self._seen, self._since = moved, self._now()
        elif (idle_s := self._now() - self._since) >= self.timeout_s:
            raise DiskStalled(f"the disk of the run hangs: {doing or 'its next file operation'} has made no progress "
                              f"for {idle_s:.0f} s (cluster.disk_timeout_s={self.timeout_s:g} allows more time). "
                              "Check the disk; --resume continues from the last checkpoint")


class FileThread:
    """Runs jobs one after another, in the order of their submission.

    After the deadline has passed once, all waiting jobs fail, and so does every later one: nothing is written after a
    gap.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        """
        Args:
            name: of the thread, for debuggers.
            timeout_s: longest time without progress.
        """
        self.timeout_s = timeout_s
        self.progress = Progress()
        self.stalled: DiskStalled | None = None
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._open: set[Future[Any]] = set()
        self._thread: threading.Thread | None = None
        _threads.add(self)

    @property
    def busy(self) -> bool:
        """Whether a job is under way or waits."""
        return bool(self._open)

    @property
    def ident(self) -> int | None:
        """As `threading.get_ident`; None before the first job."""
        return None if self._thread is None else self._thread.ident

    @property
    def inside(self) -> bool:
        """Whether the caller is a job of this thread."""
        return threading.current_thread() is self._thread

    @property
    def moved(self) -> tuple[int, int]:
        """Changes with progress: operations that began or ended, and bytes that the thread has read or written (where
        the system counts them), so that a large file on a slow disk counts as progress."""
        return self.progress.moved, _bytes_of(self._thread)

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Queue a job; returns at once."""
        future: Future[T] = Future()
        if self.stalled is not None:
            future.set_exception(self.stalled)
            return future
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name=self._name)
            self._thread.start()
        self._open.add(future)
        self._jobs.put((future, lambda: job(*args)))
        return future

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """Queue a job, and wait for it.

        Raises:
            DiskStalled: the thread made no progress for `timeout_s`. Errors of the job are raised unchanged.
        """
        return await self.wait(self.submit(job, *args))

    async def wait(self, future: Future[T]) -> T:
        """Wait for a queued job; errors as in `run`. Cancelling the wait does not cancel the job."""
        mine = asyncio.wrap_future(future)
        mine.add_done_callback(lambda over: over.cancelled() or over.exception())  # marks the exception as retrieved
        loop = asyncio.get_running_loop()
        deadline = self._deadline(loop.time)
        while not mine.done():
            began = loop.time()
            await asyncio.wait((mine,), timeout=self._pause_s)
            if not mine.done():
                self._look(deadline, loop.time() - began)
        return mine.result()

    def do(self, job: Callable[..., T], *args: Any) -> T:
        """`run` without an event loop."""
        future, deadline = self.submit(job, *args), self._deadline(time.monotonic)
        while True:
            began = time.monotonic()
            try:
                return future.result(self._pause_s)
            except NotYet:
                if future.done():
                    raise
                self._look(deadline, time.monotonic() - began)

    def hurry(self) -> None:
        """The run shall end at once: shorten the deadline to seconds."""
        self.timeout_s = min(self.timeout_s, HURRY_S)

    def interrupt(self) -> None:
        """Interrupt the job under way (`Interrupted`) at its next sign of progress; waiting jobs will run."""
        self.progress.interrupted = self.busy

    def close(self) -> None:
        """Let the thread end after its last job, without waiting for it."""
        if self._thread is not None:
            self._jobs.put(None)

    @property
    def _pause_s(self) -> float:
        return min(LOOK_S, self.timeout_s / 4)

    def _deadline(self, now: Callable[[], float]) -> ProgressDeadline:
        return ProgressDeadline(self.timeout_s, now)

    def _look(self, deadline: ProgressDeadline, waited_s: float) -> None:
        deadline.timeout_s = self.timeout_s  # `hurry` may have been called
        if waited_s > SUSPENDED_S:
            deadline.exclude(waited_s)
        try:
            deadline.check(self.moved, self.progress.doing)
        except DiskStalled as error:
            self.stalled = self.stalled or error
            for future in list(self._open):
                with suppress(InvalidStateError):  # it has just ended
                    future.set_exception(error)
                self._open.discard(future)

    def _work(self) -> None:
        work_for(self.progress)
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if self.stalled is not None:  # the disk is back too late: nothing is written after a gap
                continue
            self.progress.moved += 1
            self.progress.interrupted = False
            try:
                outcome = job()
            except BaseException as error:
                self._end(future.set_exception, error)
            else:
                self._end(future.set_result, outcome)
            self.progress.moved += 1
            self._open.discard(future)  # after its waiters were notified: until then the thread counts as busy
            del future, job, entry

    @staticmethod
    def _end(settle: Callable[[Any], None], outcome: Any) -> None:
        with suppress(InvalidStateError):  # already failed by the deadline
            settle(outcome)


class RunFiles:
    """The two threads that write a driver's files: small files in the order of events, and checkpoints (hashing and
    flushing one takes minutes, during which training continues)."""

    def __init__(self, timeout_s: float = 600.0) -> None:
        self.records = FileThread("records", timeout_s)
        """Metrics, samples, ledger, faults, status, evaluations."""
        self.checkpoints = FileThread("checkpoints", timeout_s)

    def hurry(self) -> None:
        """The run shall end at once; see `FileThread.hurry`."""
        self.records.hurry()
        self.checkpoints.hurry()

    def close(self) -> None:
        """Let both threads end after their last jobs."""
        self.records.close()
        self.checkpoints.close()


def _bytes_of(thread: threading.Thread | None) -> int:
    """Bytes that a thread of this process has read and written, files of all kinds together; 0 where the system does
    not count them."""
    try:
        lines = Path(f"/proc/self/task/{thread.native_id if thread else 0}/io").read_text().split()
    except OSError:
        return 0
    return sum(map(int, lines[1::2]))


_threads: weakref.WeakSet[FileThread] = weakref.WeakSet()


def at_work() -> bool:
    """Whether any file thread of this process has work that will end without help: for virtual clocks of tests, which
    must not run ahead of real threads."""
    held = hanging()
    return any(thread.busy and thread.stalled is None and thread.ident not in held for thread in list(_threads))
