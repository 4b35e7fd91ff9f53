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
from rlhf_ray.files.durable import Progress, work_for

T = TypeVar("T")
LOOK_S = 0.5
"""Longest pause between two checks of a thread's progress."""
STOOD_STILL_S = 5.0
"""Where no look was possible for longer, this process stood still itself, and its thread with it."""
HURRY_S = 5.0
"""Deadline of a disk without progress once the run is to end at once."""


class ProgressDeadline:
    """Ends a wait for something that makes no progress; slow progress is waited for."""

    def __init__(self, timeout_s: float, now: Callable[[], float]) -> None:
        self.timeout_s, self._now = timeout_s, now
        self._seen: Any = None
        self._since = now()

    def stood_still(self, seconds: float) -> None:
        """Nothing could move meanwhile: the time does not count."""
        self._since += seconds

    def look(self, moved: Any, doing: str) -> None:
        """Compare with the last look.

        Args:
            moved: anything that changes with progress.
            doing: what is under way, in words.

        Raises:
            DiskStalled: nothing has changed for `timeout_s`.
        """
        if moved != self._seen:
            self._seen, self._since = moved, self._now()
        elif (still_s := self._now() - self._since) >= self.timeout_s:
            raise DiskStalled(f"the disk of the run hangs: {doing or 'its next file operation'} has made no progress "
                              f"for {still_s:.0f} s (cluster.disk_timeout_s={self.timeout_s:g} allows more time). "
                              "Check the disk; --resume goes on from the last checkpoint")


class FileThread:
    """Does one job after another, in the order in which they were given.

    After the deadline has passed once, whatever waits fails, and so does every job given later: what is on disk then
    is what was on disk before, in order.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        """
        Args:
            name: of the thread, for debuggers.
            timeout_s: longest time without any progress.
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
        the system counts them), so that a large file on a slow disk is seen to grow."""
        return self.progress.moved, _bytes_of(self._thread)

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Have a job done after those before it; nothing here waits for it."""
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
        """Have a job done, and wait for it.

        Raises:
            DiskStalled: the thread made no progress for `timeout_s`. What the job raises is raised as it is.
        """
        return await self.wait(self.submit(job, *args))

    async def wait(self, future: Future[T]) -> T:
        """Wait for a job that was given; errors as in `run`. Who is cancelled meanwhile leaves the job where it is."""
        mine = asyncio.wrap_future(future)
        mine.add_done_callback(lambda over: over.cancelled() or over.exception())  # nobody may be there to hear it
        loop = asyncio.get_running_loop()
        deadline = self._deadline(loop.time)
        while not mine.done():
            began = loop.time()
            await asyncio.wait((mine,), timeout=self._pause_s)
            if not mine.done():
                self._look(deadline, loop.time() - began)
        return mine.result()

    def do(self, job: Callable[..., T], *args: Any) -> T:
        """`run` for where there is no event loop."""
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
        """The run is to end at once: a disk that shows no progress is given up within seconds."""
        self.timeout_s = min(self.timeout_s, HURRY_S)

    def interrupt(self) -> None:
        """Have the job under way leave off (`Interrupted`) where it next could be seen to move; a job that waits will
        be done."""
        self.progress.interrupted = self.busy

    def close(self) -> None:
        """Let the thread end after its last job; nothing waits for that."""
        if self._thread is not None:
            self._jobs.put(None)

    @property
    def _pause_s(self) -> float:
        return min(LOOK_S, self.timeout_s / 4)

    def _deadline(self, now: Callable[[], float]) -> ProgressDeadline:
        return ProgressDeadline(self.timeout_s, now)

    def _look(self, deadline: ProgressDeadline, waited_s: float) -> None:
        deadline.timeout_s = self.timeout_s  # a hurry may have come
        if waited_s > STOOD_STILL_S:
            deadline.stood_still(waited_s)
        try:
            deadline.look(self.moved, self.progress.doing)
        except DiskStalled as error:
            self.stalled = self.stalled or error
            for future in list(self._open):
                with suppress(InvalidStateError):  # it came to its end this moment
                    future.set_exception(error)
                self._open.discard(future)

    def _work(self) -> None:
        work_for(self.progress)
        while (found := self._jobs.get()) is not None:
            future, job = found
            if self.stalled is not None:  # the disk is back, too late: what comes after a gap is not written
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
            self._open.discard(future)  # after whoever waits was told: until then the thread is at work
            del future, job, found

    @staticmethod
    def _end(settle: Callable[[Any], None], outcome: Any) -> None:
        with suppress(InvalidStateError):  # given up by those who waited
            settle(outcome)


class RunFiles:
    """The two threads that write what a driver writes: small files in the order of events, and checkpoints beside them
    (to hash and flush one takes minutes, in which steps go on)."""

    def __init__(self, timeout_s: float = 600.0) -> None:
        self.records = FileThread("records", timeout_s)
        """Metrics, samples, ledger, faults, status, evaluations."""
        self.checkpoints = FileThread("checkpoints", timeout_s)

    def hurry(self) -> None:
        """The run is to end at once; see `FileThread.hurry`."""
        self.records.hurry()
        self.checkpoints.hurry()

    def close(self) -> None:
        """No job will follow."""
        self.records.close()
        self.checkpoints.close()


def _bytes_of(thread: threading.Thread | None) -> int:
    """Bytes that a thread of this process has read and written, files of all kinds together; 0 where nobody counts."""
    try:
        lines = Path(f"/proc/self/task/{thread.native_id if thread else 0}/io").read_text().split()
    except OSError:
        return 0
    return sum(map(int, lines[1::2]))


_threads: weakref.WeakSet[FileThread] = weakref.WeakSet()


def at_work() -> bool:
    """Whether any file thread of this process has work that will come to its end by itself: for clocks of tests, which
    must not run ahead of real threads."""
    held = hanging()
    return any(thread.busy and thread.stalled is None and thread.ident not in held for thread in list(_threads))
