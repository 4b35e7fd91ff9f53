"""The process that runs a user's environment: it serves many open episodes at a time, each in a thread of its own with
its own event loop, so that one that blocks holds up no other.

Started by a keeper (`user_code.keeper`), with the number of an open socket as its argument. Requests are pickles,
answers are JSON; both carry the number of the episode. It ends when the socket closes.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import os
import pickle
import queue
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rlhf_ray.environments.adapters import brought
from rlhf_ray.environments.answers import ANSWER_BYTES
from rlhf_ray.environments.shapes import Episode, Target, exhausted, recognise
from rlhf_ray.user_code.frames import print_by_lines, receive, send
from rlhf_ray.user_code.loading import describe, users_line

STACK_BYTES = 1 << 21
"""Stack of the thread of an episode; all stacks count as memory of the process."""
END_S = 0.3
"""Time for the `close` of the episodes that are still open when the socket closes."""


def main(descriptor: int) -> None:
    """Serve the socket of that number until it closes."""
    serve(socket.socket(fileno=descriptor))


def serve(channel: socket.socket) -> None:
    """Load the environment that the first frame names, and run its episodes until the socket closes."""
    print_by_lines()
    with channel:
        setup = receive(channel)
        if setup is None:
            return
        try:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # an episode's event loop has three files
            if setup["memory_mib"] is not None:
                limit_memory(setup["memory_mib"])
            target = recognise(brought(*setup["source"]), setup["schemas"])
            send(channel, {"pid": os.getpid(), **target.facts()})
        except BaseException as error:
            send(channel, {"error": describe(error)})
            return
        threading.stack_size(STACK_BYTES)
        Host(channel, target).serve()


def limit_memory(mib: int) -> None:
    """Bound what this process, and each that it starts, may allocate (RLIMIT_DATA: private writable memory)."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = mib << 20 if hard == resource.RLIM_INFINITY else min(mib << 20, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class Host:
    """The episodes of this process, by their numbers."""

    def __init__(self, channel: socket.socket, target: Target) -> None:
        self.pid = os.getpid()
        self._channel, self._target = channel, target
        self._sending = threading.Lock()
        self._threads: dict[int, EpisodeThread] = {}

    def serve(self) -> None:
        """Pass requests on to the episodes' threads until the socket closes; then close the episodes."""
        while (request := receive(self._channel)) is not None:
            number = request["episode"]
            if request["call"] == "where":
                thread = self._threads.get(number)
                self.send({"where": number, "line": thread.line() if thread else ""})
                continue
            if request["call"] in ("reset", "restore", "run") and not self._begin(number):
                continue
            if request["call"] == "close" and number not in self._threads:  # it did not begin
                self.send({"episode": number, "answer": {}, "snapshot": None})
                continue
            self._threads[number].requests.put(request)
            if request["call"] == "close":
                del self._threads[number]
        deadline = time.monotonic() + END_S
        for thread in self._threads.values():
            thread.requests.put({"call": "close"})
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, number: int) -> bool:
        thread = EpisodeThread(number, self, self._target)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started
            self.send({"episode": number, "error": describe(error), "exhausted": "memory"})
            return False
        self._threads[number] = thread
        return True

    def send(self, message: dict[str, Any]) -> None:
        """Send an answer; one that is too long becomes an error."""
        body = json.dumps(message)
        if len(body) > ANSWER_BYTES:
            snapshot = " with its snapshot" if message.get("snapshot") else ""
            error = f"it answered with {len(body)} bytes{snapshot}, and may answer with {ANSWER_BYTES}"
            message = {"episode": message["episode"], "error": error, "exhausted": ""}
        with self._sending:
            send(self._channel, message)


class EpisodeThread(threading.Thread):
    """One episode. It ends after `close`."""

    def __init__(self, number: int, host: Host, target: Target) -> None:
        super().__init__(daemon=True, name=f"episode {number}")
        self.requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._number, self._host = number, host
        self._episode = Episode(target, self._run, lambda name: host.send({"tool": number, "name": name}))
        self._runner: asyncio.Runner | None = None
        self._awaited: Any = None

    def run(self) -> None:
        """Answer the requests one by one."""
        call = ""
        while call != "close":
            request = self.requests.get()
            call = request["call"]
            answer = {"episode": self._number, **self._answer(call, request.get("given"))}
            if os.getpid() != self._host.pid:  # the user's code has forked, and this is the copy
                os.kill(os.getpid(), signal.SIGKILL)
            with suppress(Exception):  # the user's code may have replaced or closed it
                sys.stdout.flush()
            try:
                self._host.send(answer)
            except ConnectionError:
                pass  # the other side has closed the socket
            except BaseException:  # the user's code has closed it, or there is no memory: nothing can be answered
                os.kill(os.getpid(), signal.SIGKILL)

    def _answer(self, call: str, given: bytes | None) -> dict[str, Any]:
        try:
            arguments = pickle.loads(given) if given else {}  # noqa: S301 - from the process that started this one
            if call == "reset":
                return {"answer": self._episode.start(**arguments), "snapshot": self._episode.snapshot()}
            if call == "step":
                return {"answer": self._episode.step(**arguments), "snapshot": self._episode.snapshot()}
            if call == "run":
                return {"answer": self._episode.run(**arguments), "snapshot": None}
            if call == "restore":
                self._episode.restore(**arguments)
                return {"answer": {}, "snapshot": None}
            if call == "reward":
                return {"answer": {"reward": self._episode.reward()}, "snapshot": None}
            self._close()
            return {"answer": {}, "snapshot": None}
        except BaseException as error:  # also SystemExit: it is reported and does not end the thread
            if isinstance(error, OSError) and error.errno == errno.EBADF:
                self._require_event_loop()
            return {"error": describe(error), "exhausted": exhausted(error)}

    def _close(self) -> None:
        try:
            self._episode.close()
        finally:
            if self._runner is not None:
                self._runner.close()

    def _run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of a function, or of the coroutine that it returns."""
        result = function(*args, **kwargs)
        if not inspect.isawaitable(result):
            return result
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._awaited = result
        try:
            return self._runner.run(_awaited(result))
        finally:
            self._awaited = None

    def _require_event_loop(self) -> None:
        """End the process if this episode's event loop is broken: the code of some episode has closed its files, and
        those of others too."""
        try:
            if self._runner is not None:
                self._runner.run(asyncio.sleep(0))
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)

    def line(self) -> str:
        """The user's line at which the thread is, or at which its coroutine waits."""
        frame = sys._current_frames().get(self.ident or 0)
        stack = [(each.filename, each.lineno or 1) for each in traceback.extract_stack(frame)] if frame else []
        if not getattr(self._awaited, "cr_running", True):
            stack += _waits(self._awaited)
        return users_line(stack)


async def _awaited(result: Any) -> Any:
    return await result


def _waits(coroutine: Any) -> Iterator[tuple[str, int]]:
    """(file, line) of a coroutine that is suspended, and of those that it waits for."""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        coroutine = coroutine.cr_await
