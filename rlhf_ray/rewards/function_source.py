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
from rlhf_ray.data.chat import ASSISTANT
from rlhf_ray.errors import RewardError, SampleError
from rlhf_ray.rewards.function_subprocess import COMPLETIONS, HEADER
from rlhf_ray.rewards.protocol import (
    NEVER_REPLACED,
    RewardAnswer,
    RewardRequest,
    finite_scores,
    shown_sample,
    with_lines,
)

ARGUMENTS = ("prompts", "responses", "labels", "finish_reasons", "prefills")
"""Keyword arguments that a function may take: lists with an entry per response. Labels are the prompts' other
columns, prefills what the prompts begin of the answers."""


class FunctionSource:
    """Calls `function(prompts=..., responses=..., labels=..., finish_reasons=..., prefills=...)` for each chunk, or
    `function(prompts=..., completions=..., completion_ids=..., **columns)` if it is written for TRL."""

    def __init__(self, name: str, config: FunctionReward) -> None:
        self._who = f"the reward function {config.function!r} (rewards.{name})"
        self._keep_special_tokens = config.keep_special_tokens
        self._function = KillableFunction(self._who, config.function, ARGUMENTS, config.timeout_s, f"rewards.{name}",
                                          takes_columns=True)

    async def start(self) -> None:
        """Import the function. Raises RewardError when that fails or its signature does not fit."""
        await self._function.start()

    @property
    def columns(self) -> list[str]:
        """Columns of the prompts' rows that the function requires as arguments; known after the start."""
        taken = self._function.taken
        return [name for name in taken["required"] if name not in COMPLETIONS] if taken["columns"] else []

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """One score per response.

        Raises:
            RewardError: the function raised, blocked past its deadline, ended its process, or did not give one finite
                number per response; shows the prompt and the response.
        """
        given = {
            "prompts": [r.prompt for r in requests],
            "responses": [r.text(self._keep_special_tokens) for r in requests],
            "labels": [r.metadata for r in requests], "finish_reasons": [r.finish_reason for r in requests],
            "prefills": [r.prefill for r in requests],
        }
        values = await self._function.call(given, [shown_sample(r) for r in requests], self._columns_of(requests))
        return RewardAnswer(finite_scores(values, requests, self._who, "fix the function", self._function.place))

    def _columns_of(self, requests: Sequence[RewardRequest]) -> dict[str, Any]:
        """The arguments of a function that is written for TRL. A column that some rows lack is None there."""
        names = [*dict.fromkeys(name for r in requests for name in r.metadata), *self.columns]
        return {
            **{name: [r.metadata.get(name) for r in requests] for name in names},
            "prompts": [r.prompt if r.messages is None else r.messages for r in requests],
            "completions": [self._completion(r) for r in requests],
            "completion_ids": [r.tokens[r.response_mask].tolist() for r in requests],
        }

    def _completion(self, request: RewardRequest) -> str | list[dict[str, str]]:
        """The response; as a message where the prompt is messages."""
        text = request.text(self._keep_special_tokens)
        return text if request.messages is None else [{"role": ASSISTANT, "content": text}]

    def printed(self) -> list[str]:
        """The lines that the function has printed since the last call, each with the reward's name."""
        return self._function.printed.take()

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

    def __init__(self, who: str, function: str, offers: Sequence[str], timeout_s: float, name: str = "",
                 takes_columns: bool = False) -> None:
        """
        Args:
            who: the function as the subject of messages.
            function: `module:name` or `file.py:name`.
            offers: names of the arguments of calls.
            timeout_s: longest wait for each call.
            name: begins each line that it prints.
            takes_columns: calls also have arguments for functions that are written for TRL.
        """
        self._who, self._function, self._offers, self._timeout_s = who, function, list(offers), timeout_s
        self._takes_columns = takes_columns
        self.taken: dict[str, Any] = {}
        """What the function takes, as `function_subprocess.accepted` has it; empty before the start."""
        self.place = ""
        """File, line and code of the function's first line, where it has one; known after the start."""
        self.printed = PrintedLines(name, who)
        """What it prints, also after its process was killed and started again."""
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

    async def call(self, arguments: dict[str, Any], samples: Sequence[str],
                   columns: dict[str, Any] | None = None) -> list[float]:
        """Call the function.

        Args:
            arguments: all of `offers`; the function gets those it takes.
            samples: the rows in words, for messages.
            columns: the arguments of a function that is written for TRL, in place of `arguments`.

        Raises:
            RewardError: it raised, ended its process, or did not answer in time; shows a sample.
        """
        async with self._turn:
            if self._process is None:
                await self._start()
            given = columns if self.taken["columns"] and columns is not None else arguments
            if not self.taken["all"]:
                given = {name: value for name, value in given.items() if name in self.taken["named"]}
            reply = await self._exchange(given, self._timeout_s, "", _culprit(None, samples), SampleError)
        if "error" in reply:
            raise SampleError(with_lines(f"{self._who} failed: {reply['error']}",
                                         _culprit(reply.get("sample"), samples), f"{NEVER_REPLACED}: fix the function"))
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
        await asyncio.to_thread(self._output.wait, SHUTDOWN_GRACE_S)

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
        self._output = BoundedOutput(self._process.stdout, self.printed)
        setup = {"function": self._function, "offers": self._offers, "columns": self._takes_columns}
        reply = await self._exchange(setup, IMPORT_S, " when it was imported")
        if "error" in reply:
            await self._kill()
            raise RewardError(with_lines(f"{self._who} cannot be used: {reply['error']}", "",
                                         "Correct the name (module:name or file.py:name), or fix the function"))
        self.place = reply.pop("place")
        self.taken = reply

    async def _exchange(
        self, message: dict[str, Any], timeout_s: float, about: str, sample: str = "",
        failure: type[RewardError] = RewardError
    ) -> dict[str, Any]:
        """Send a frame and wait for the answer. On failure, kill the process and raise `failure`.

        Args:
            about: end of the sentence that describes the failure.
            sample: lines below it.
        """
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
            raise failure(with_lines(f"{self._who} gave no answer within {timeout_s:g} s{about}; its process was "
                                     "killed", sample, "Make it faster, or raise timeout_s")) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._gone(GONE_S)
            ending = _ending(process.poll() if process else None)
            await self._kill()
            raise failure(with_lines(f"{self._who} {ending}{about}", sample,
                                     f"{NEVER_REPLACED}: fix the function")) from None
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


class PrintedLines:
    """What a function printed, line by line: copied to this process's output, and kept until it is taken, up to
    `OUTPUT_BYTES`; later lines are only copied then."""

    def __init__(self, name: str, who: str) -> None:
        """
        Args:
            name: begins each line.
            who: the function as the subject of messages.
        """
        self._begin, self.who = f"{name}: " if name else "", who
        self._lines: list[str] = []
        self._size = 0
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        """Add a line without its end."""
        line = self._begin + line
        with self._lock:
            if self._size < OUTPUT_BYTES:
                self._lines.append(line)
                self._size += len(line)
        with suppress(OSError, ValueError):  # this process's output may be closed
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def take(self) -> list[str]:
        """The lines that were kept; they are no longer kept."""
        with self._lock:
            lines = self._lines
            self._lines, self._size = [], 0
        return lines


class BoundedOutput:
    """Reads what a process prints, and passes on as much as `left` allows: a full pipe would hold the process up. It
    ends when no process has the pipe any more."""

    def __init__(self, pipe: IO[bytes] | None, printed: PrintedLines) -> None:
        self.left = OUTPUT_BYTES
        """Bytes that are passed on before others are dropped; negative when some were."""
        self._printed, self._pending = printed, b""
        self._thread = threading.Thread(target=self._copy, args=(pipe,), name="reward function output", daemon=True)
        if pipe is not None:
            self._thread.start()

    def wait(self, patience_s: float) -> None:
        """Wait until everything is read that an ended process printed."""
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def _copy(self, pipe: IO[bytes]) -> None:
        with pipe:
            while part := os.read(pipe.fileno(), 1 << 16):
                over = len(part) > self.left >= 0
                *lines, self._pending = (self._pending + part[:max(self.left, 0)]).split(b"\n")
                self.left = -1 if over else self.left - len(part)
                for line in lines:
                    self._add(line)
                if over:
                    self._end_line()
                    self._printed.add(f"({self._printed.who} prints more than {OUTPUT_BYTES} bytes in a call; the rest "
                                      "is dropped)")
            self._end_line()

    def _end_line(self) -> None:
        if self._pending:
            self._add(self._pending)
            self._pending = b""

    def _add(self, line: bytes) -> None:
        self._printed.add(line.decode("utf-8", "replace").rstrip("\r"))


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
    """The sample that an error names by its number, else the first: the attribute `sample` of a user's exception may be
    anything."""
    if isinstance(sample, int) and 0 <= sample < len(samples):
        return samples[sample]
    return samples[0] if len(samples) == 1 else f"{samples[0]}\n  (the first of {len(samples)} responses)"


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
