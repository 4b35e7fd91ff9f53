"""A user's function as a reward source, called in a process of its own that can be killed.

The function may raise, block, crash or fill memory without affecting the reward scorer. A blocked call cannot be
interrupted inside one process (nothing stops a C function), so deadlines are enforced by killing the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

import psutil

from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.errors import RewardError, SampleError
from rlhf_ray.rewards.function_subprocess import HEADER
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, finite_scores, first_of, sample_names

ARGUMENTS = ("prompts", "responses", "labels", "finish_reasons", "prefills")
"""Keyword arguments that a function may take: lists with an entry per response. Labels are the prompts' other
columns, prefills what the prompts begin of the answers."""


class FunctionSource:
    """Calls `function(prompts=..., responses=..., labels=..., finish_reasons=..., prefills=...)` for each chunk."""

    def __init__(self, name: str, config: FunctionReward) -> None:
        self._who = f"the reward function {config.function!r} (rewards.{name})"
        self._keep_special_tokens = config.keep_special_tokens
        self._function = KillableFunction(self._who, config.function, ARGUMENTS, config.timeout_s)

    async def start(self) -> None:
        """Import the function. Raises RewardError when that fails or its signature does not fit."""
        await self._function.start()

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """One score per response.

        Raises:
            RewardError: the function raised, blocked past its deadline, ended its process, or did not give one finite
                number per response; names the samples.
        """
        given = {
            "prompts": [r.prompt for r in requests],
            "responses": [r.text(self._keep_special_tokens) for r in requests],
            "labels": [r.metadata for r in requests], "finish_reasons": [r.finish_reason for r in requests],
            "prefills": [r.prefill for r in requests],
        }
        values = await self._function.call(given, [sample_names([r.key]) for r in requests])
        return RewardAnswer(finite_scores(values, requests, self._who, "fix the function."))

    async def stop(self) -> None:
        """End its process, within a few seconds even while a call hangs."""
        await self._function.stop()


IMPORT_S = 120.0
"""Longest time for the import of a function, which may import a whole framework."""
SHUTDOWN_GRACE_S = 0.5
"""Time for an idle process to end before it is killed."""
OUTPUT_BYTES = 1 << 20
"""What a function may print in each call; the rest is dropped, because the worker's log has no limit."""
GONE_S = 5.0
"""Longest wait for a killed process to disappear."""
ANSWER_BYTES = 1 << 26
"""Longest valid answer."""


class KillableFunction:
    """A function in a process of its own, one call at a time. After the process was killed, the next call restarts
    it."""

    def __init__(self, who: str, function: str, offers: Sequence[str], timeout_s: float) -> None:
        """
        Args:
            who: the function as the subject of messages.
            function: `module:name` or `file.py:name`.
            offers: names of the arguments of calls.
            timeout_s: longest wait for each call.
        """
        self._who, self._function, self._offers, self._timeout_s = who, function, list(offers), timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._calling = False
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Id of the process; None without one."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and import the function.

        Raises:
            RewardError: it cannot be imported in time, or does not take the arguments.
        """
        async with self._turn:
            await self._start()

    async def call(self, arguments: dict[str, Any], samples: Sequence[str]) -> list[float]:
        """Call the function.

        Args:
            arguments: all of `offers`; the function gets those it takes.
            samples: names of the rows, for messages.

        Raises:
            RewardError: it raised, ended its process, or did not answer in time; names the samples.
        """
        async with self._turn:
            if self._process is None:
                await self._start()
            reply = await self._exchange(arguments, self._timeout_s, f" for {first_of(samples)}", SampleError)
        if "error" in reply:
            raise SampleError(f"{self._who} failed for {_culprit(reply.get('sample'), samples)}: {reply['error']}. A "
                              "missing score is never replaced by a default: fix the function")
        return list(reply["scores"])

    async def stop(self) -> None:
        """End the process: an idle one by closing its socket, a busy one by killing it."""
        if self._process is None:
            return
        started = _started_by(self._process.pid)
        if not self._calling:
            self._writer.close()
            await self._gone(SHUTDOWN_GRACE_S)
        await self._kill()
        _kill_all(started)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "rlhf_ray.rewards.function_subprocess", str(theirs.fileno()),
                     str(os.getpid())],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, start_new_session=True, env=_environment(),
                )
            except OSError as error:
                self._writer.close()
                raise RewardError(f"{self._who}: no process can be started for it: {error}. Free memory or raise the "
                                  "limit of processes (ulimit -u)") from error
        self._output = BoundedOutput(self._process.stdout, self._who)
        setup = {"function": self._function, "offers": self._offers}
        reply = await self._exchange(setup, IMPORT_S, " when it was imported")
        if "error" in reply:
            await self._kill()
            raise RewardError(f"{self._who} cannot be used: {reply['error']}. Correct the name (module:name or "
                              "file.py:name), or fix the function")

    async def _exchange(
        self, message: dict[str, Any], timeout_s: float, about: str, failure: type[RewardError] = RewardError
    ) -> dict[str, Any]:
        """Send a frame and wait for the answer. On failure, kill the process and raise `failure`."""
        process, self._calling = self._process, True
        self._output.left = OUTPUT_BYTES
        try:
            async with asyncio.timeout(timeout_s):
                body = pickle.dumps(message)
                self._writer.write(HEADER.pack(len(body)) + body)
                await self._writer.drain()
                size = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
                if size > ANSWER_BYTES:
                    raise failure(f"{self._who} answered with {size} bytes; fix the function")
                return dict(json.loads(await self._reader.readexactly(size)))
        except TimeoutError:
            await self._kill()
            raise failure(f"{self._who} gave no answer within {timeout_s:g} s{about}; its process was killed. Make "
                              "it faster, or raise timeout_s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._gone(GONE_S)
            ending = _ending(process.poll() if process else None)
            await self._kill()
            raise failure(f"{self._who} {ending}{about}. A missing score is never replaced by a default: fix the "
                              "function (the worker's log has its output)") from None
        except BaseException:  # such as cancellation: the answer to this call must not be read as that of the next
            await self._kill()
            raise
        finally:
            self._calling = False

    async def _kill(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self._process.pid, signal.SIGSTOP)  # so that it starts no more
        deadline = time.monotonic() + GONE_S
        while (started := _started_by(self._process.pid)) and time.monotonic() < deadline:
            _kill_all(started)  # those in sessions of their own too
            await asyncio.sleep(0.01)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its session outlives it, if it has ended
        self._writer.close()
        await self._gone(GONE_S)
        self._process = None

    async def _gone(self, patience_s: float) -> None:
        """Wait for the process to end. (uvloop, which Ray uses, has no subprocesses off the main thread.)"""
        deadline = time.monotonic() + patience_s
        while self._process and self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def _environment() -> dict[str, str]:
    """The worker's, without the variable by which a program `python FILE` that the function starts would not find the
    modules beside it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


class BoundedOutput:
    """Copies what a process prints to this process's output, as much as `left` allows, and reads the rest: a full pipe
    would hold the process up. It ends when no process has the pipe any more."""

    def __init__(self, pipe: IO[bytes] | None, who: str) -> None:
        self.left = OUTPUT_BYTES
        """Bytes that are copied before others are dropped; negative when some were."""
        self._who = who
        if pipe is not None:
            threading.Thread(target=self._copy, args=(pipe,), name="reward function output", daemon=True).start()

    def _copy(self, pipe: IO[bytes]) -> None:
        with pipe:
            while part := os.read(pipe.fileno(), 1 << 16):
                text, over = part[:max(self.left, 0)].decode("utf-8", "replace"), len(part) > self.left >= 0
                self.left = -1 if over else self.left - len(part)
                with suppress(OSError, ValueError):  # this process's output may be closed
                    sys.stdout.write(text + (f"\n({self._who} prints more than {OUTPUT_BYTES} bytes in a call; "
                                             "the rest is dropped)\n" if over else ""))
                    sys.stdout.flush()


def _started_by(pid: int) -> list[psutil.Process]:
    """What a process has started, and what that has started."""
    try:
        return [each for each in psutil.Process(pid).children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def _kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _culprit(sample: Any, samples: Sequence[str]) -> str:
    """The sample that an error names by its number, or all of them: the attribute `sample` of a user's exception may
    be anything."""
    known = isinstance(sample, int) and 0 <= sample < len(samples)
    return samples[sample] if known else first_of(samples)


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
