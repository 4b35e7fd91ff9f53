"""Runs programs that a policy wrote, held back from files, network and processes that are not theirs.

What holds them is in `sandbox_process`; how the kernel is asked for it in `sandbox_kernel`. This is for programs that
nobody has read: what a user brings (`user_code.process`) is trusted, and is not run in it.

Example:
    async with SandboxPool("the reward code", Limits(), 2, print_nothing) as pool:
        outcome = await pool.run(Job("print(1 + 1)"))
        assert outcome.output == "2\\n"
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from rlhf_ray.errors import RLHFError
from rlhf_ray.user_code.process import AnswerTooLong, PrintedLines, UserProcess

START_S = 60.0
"""Longest time for a worker's start."""
GRACE_S = 20.0
"""Time for a worker's answer after its program's, to kill it and to remove its files."""
TRIES = 2
"""Workers that a program may lose before the sandbox is broken: one may be killed by chance (for lack of memory)."""


class SandboxBroken(RLHFError):
    """Programs cannot be run, or are not held back; says which rung is missing and how to allow it."""

    exit_code = 2


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    memory_mib: int = 1024
    disk_mib: int = 64
    output_kib: int = 1024
    max_processes: int = 1
    allow_missing: Sequence[str] = ()
    """Rungs without which programs may run."""


@dataclass(frozen=True)
class Job:
    """A program, and what is wanted of it."""

    code: str
    timeout_s: float = 10.0
    """Wall clock time."""
    stdin: str = ""
    setup: str = ""
    """Code that runs before it, with the same names."""
    tests: str | None = None
    """Code that runs after it, with the same names; the verdict is "" if it came to its end."""
    function: str | None = None
    """Function of the program, or method of its class Solution, to be called; the verdict is its result as JSON."""
    arguments: Sequence[Any] = ()

    def request(self) -> dict[str, Any]:
        """As the worker takes it."""
        plain = {"name": "__main__", "kind": "script", "code": self.code, "timeout_s": self.timeout_s,
                 "stdin": self.stdin, "setup": self.setup}
        if self.tests is not None:
            plain |= {"kind": "check", "wanted": {"tests": self.tests}}
        elif self.function is not None:
            wanted = {"function": self.function, "arguments": list(self.arguments)}
            plain |= {"kind": "call", "name": "program", "wanted": wanted}
        return plain


@dataclass(frozen=True)
class Outcome:
    """What came of a program."""

    status: int | None
    """Exit code, negative for a signal; None for a session that is still open."""
    killed: Literal["", "time", "disk", "output"]
    """The limit beyond which it was killed. Beyond its memory, a program gets MemoryError."""
    verdict: str | None
    """What was wanted; None if it did not come to it."""
    output: str
    errors: str
    """What it printed to stderr: the traceback of an exception too."""
    seconds: float
    """How long it ran."""


class Sandbox:
    """One worker, which runs one program at a time, or holds one session. It restarts after it was killed."""

    def __init__(self, who: str, limits: Limits, printed: PrintedLines) -> None:
        """
        Args:
            who: what the programs are for, as the subject of messages.
            printed: takes what the worker has to say.
        """
        self._who, self._limits, self._printed = who, limits, printed
        self._process: UserProcess | None = None
        self.rungs: dict[str, str] = {}
        """Why each rung is missing, "" for one that holds; known after the start."""

    async def start(self) -> None:
        """Start the worker, which tries the rungs.

        Raises:
            SandboxBroken: programs cannot be held back.
        """
        self._process = UserProcess(self._who, self._printed)
        await self._process.start("rlhf_ray.user_code.sandbox_process", SandboxBroken)
        setup = {**asdict(self._limits), "allow_missing": list(self._limits.allow_missing)}
        try:
            answer = await self._exchange(setup, START_S)
        except _Lost as lost:
            await self.stop()
            raise SandboxBroken(f"{self._who}: the sandbox cannot be started: its worker {lost}") from None
        if "broken" in answer:
            await self.stop()
            raise SandboxBroken(f"{self._who}: programs cannot be held back: {answer['broken']}")
        self.rungs = answer["rungs"]

    async def run(self, job: Job) -> Outcome:
        """Run a program to its end.

        Raises:
            SandboxBroken: it could not be run, through no fault of its own.
        """
        why = ""
        for _ in range(TRIES):
            try:
                return await self._answered(job.request(), job.timeout_s)
            except _Lost as lost:
                why = str(lost)
        raise SandboxBroken(f"{self._who}: the sandbox's worker was lost {TRIES} times with the same program: it {why}."
                            " Nothing in a sandbox can kill it; free memory, or lower processes")

    async def turn(self, code: str, timeout_s: float) -> Outcome:
        """Run a part of a session, whose parts share their names and files. A new one begins after it has ended.

        Raises:
            SandboxBroken: as `run`; the session is lost.
        """
        request = {"kind": "session", "name": "__main__", "setup": "", "code": code, "timeout_s": timeout_s}
        try:
            return await self._answered(request, timeout_s)
        except _Lost as lost:
            raise SandboxBroken(f"{self._who}: the sandbox's worker was lost: it {lost}") from None

    async def _answered(self, request: dict[str, Any], timeout_s: float) -> Outcome:
        if self._process is None:
            await self.start()
        answer = await self._exchange(request, timeout_s + GRACE_S)
        if "broken" in answer:
            raise SandboxBroken(f"{self._who}: the sandbox is broken: {answer['broken']}")
        return Outcome(**answer)

    async def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for the answer. Raises _Lost; the worker is gone then."""
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(timeout_s):
                process.send(message)
                await process.drain()
                return dict(json.loads(await process.receive(self._longest)))
        except TimeoutError:
            await self._kill()
            raise _Lost(f"gave no answer within {timeout_s:g} s") from None
        except (AnswerTooLong, asyncio.IncompleteReadError, ConnectionError):
            ending = await process.ending()
            await self._kill()
            raise _Lost(ending) from None
        except BaseException:  # such as cancellation: the answer must not be read as that of the next
            await self._kill()
            raise

    @property
    def _longest(self) -> int:
        """Bytes of an answer: each byte of both outputs may become six in JSON."""
        return 20 * (self._limits.output_kib << 10) + (1 << 20)

    async def _kill(self) -> None:
        if self._process is not None:
            await self._process.kill()
            self._process = None

    async def stop(self) -> None:
        """End the worker with all that runs in it."""
        if self._process is not None:
            await self._process.end(idle=True)
            self._process = None


class _Lost(Exception):
    """The worker is gone; the predicate of a message."""


@dataclass
class SandboxPool:
    """Workers that run programs side by side. Used from one event loop."""

    who: str
    limits: Limits
    processes: int
    printed: PrintedLines
    _workers: list[Sandbox] = field(default_factory=list)

    async def start(self) -> dict[str, str]:
        """Start a worker, and others when they are needed; returns why each rung is missing, "" for one that holds.

        Raises:
            SandboxBroken: programs cannot be held back.
        """
        self._idle: asyncio.LifoQueue[Sandbox] = asyncio.LifoQueue()
        self._workers = [Sandbox(self.who, self.limits, self.printed) for _ in range(self.processes)]
        try:
            await self._workers[0].start()
        except BaseException:
            await self.stop()
            raise
        for each in reversed(self._workers):  # the started one is taken first
            self._idle.put_nowait(each)
        return self._workers[0].rungs

    async def run(self, job: Job) -> Outcome:
        """Run a program when a worker is idle. Raises SandboxBroken, as `Sandbox.run`."""
        worker = await self._idle.get()
        try:
            return await worker.run(job)
        finally:
            self._idle.put_nowait(worker)

    async def stop(self) -> None:
        """End all workers, with the programs that they run."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(each.stop() for each in workers))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
