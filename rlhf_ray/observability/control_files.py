"""Requests to a running run and its answers: small files in `control/` of the run's directory.

A command writes `<id>.request.json`; the run removes it, does what it asks, and writes `<id>.answer.json`. Anyone who
may write into the run's directory may make requests, from any machine that sees it. This module only carries requests
and answers; the handlers are given to `answering`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from rlhf_ray.errors import ConfigError, DiskStalled, RLHFError, SupersededError, WorkerError
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.observability.background_task import OnFailure, background_task, log_failure
from rlhf_ray.observability.run_directory import RunDirectory, read_json

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Does what a request asks for with its arguments, and returns the result; an RLHFError refuses the request."""

LOOK_EVERY_S = 0.5
SILENT_S = 15.0
"""A run that wrote no status for this long is taken for hung or gone."""
REQUEST, ANSWER = ".request.json", ".answer.json"


def ask(
    run_dir: Path, what: str, arguments: Mapping[str, Any] | None = None, timeout_s: float = 600.0
) -> dict[str, Any]:
    """Make a request to a run, and wait for the answer.

    Args:
        what: name of the request, e.g. "profile".
        arguments: any values that JSON can hold.
        timeout_s: longest wait for the answer.

    Returns:
        The handler's result.

    Raises:
        ConfigError: the run is not running, or refuses.
        WorkerError: the run did not answer in time.
    """
    run = RunDirectory(run_dir)
    require_running(run)
    run.control.mkdir(exist_ok=True)
    name = uuid4().hex
    question, answer = run.control / f"{name}{REQUEST}", run.control / f"{name}{ANSWER}"
    write_atomically(question, json.dumps({"what": what, "arguments": dict(arguments or {})}).encode())
    try:
        reply = _wait_for_reply(run, answer, what, time.monotonic() + timeout_s, timeout_s)
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    if "refused" in reply:
        raise ConfigError(reply["refused"])
    return dict(reply["done"])


def require_running(run: RunDirectory) -> None:
    """Refuse a directory whose run is not running.

    Raises:
        ConfigError: with what is known about the run instead.
    """
    if not (live := read_json(run.status)):
        raise ConfigError(f"no run is in progress in {run.path}: {run.status.name} does not exist. Name the directory "
                          "of a PPO run (its run.dir) once its workers are ready")
    if "ended" in live:
        raise ConfigError(f"the run in {run.path} has ended ({live['ended']}); only a running one takes requests")
    if (silent := time.time() - live.get("time", 0.0)) > SILENT_S:
        raise ConfigError(f"the run in {run.path} has written no status for {silent:.0f} s: it hangs or is gone")


def _wait_for_reply(run: RunDirectory, answer: Path, what: str, deadline: float, timeout_s: float) -> dict[str, Any]:
    while time.monotonic() < deadline:
        if answer.exists():
            return dict(json.loads(answer.read_text()))
        require_running(run)
        time.sleep(LOOK_EVERY_S / 2)
    raise WorkerError(f"the run in {run.path} did not answer {what!r} within {timeout_s:g} s; "
                      "`rlhf-ray status` shows what it is doing")


class Request(NamedTuple):
    """A request that was read from its file."""

    name: str
    what: str
    arguments: Mapping[str, Any]


@asynccontextmanager
async def answering(
    directory: RunDirectory, handlers: Mapping[str, Handler], on_failure: OnFailure = log_failure
) -> AsyncIterator[None]:
    """Answer requests during the enclosed work, each in a task of its own, so that they do not wait for each other.
    Requests to an earlier process are refused.

    Args:
        on_failure: called when requests cannot be read.
    """
    records = directory.files.records
    await records.run(_refuse_old, directory)
    tasks: set[asyncio.Task[None]] = set()
    try:
        async with background_task("the control requests",
                                   lambda: _poll(directory, handlers, tasks), on_failure):
            yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(DiskStalled):  # the run itself reports it
            await records.run(_refuse_old, directory)


async def _poll(
    directory: RunDirectory, handlers: Mapping[str, Handler], tasks: set[asyncio.Task[None]]
) -> None:
    while True:
        for request in await directory.files.records.run(_take_requests, directory):
            task = asyncio.create_task(_answer(directory, request, handlers), name=f"control {request.what}")
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(LOOK_EVERY_S)


async def _answer(directory: RunDirectory, request: Request, handlers: Mapping[str, Handler]) -> None:
    reply: dict[str, Any] = {"refused": f"the run ended before it completed {request.what!r}"}
    try:
        if (handler := handlers.get(request.what)) is None:
            reply = {"refused": f"this run does not support {request.what!r}; use one of {', '.join(sorted(handlers))}"}
        else:
            reply = {"done": dict(await handler(request.arguments))}
    except RLHFError as error:
        reply = {"refused": str(error)}
    except Exception as bug:  # the client needs an answer, and the run must not end because of it
        reply = {"refused": f"{request.what!r} failed: {type(bug).__name__}: {bug}"}
    finally:
        directory.files.records.submit(_reply, directory, request.name, reply)


def _take_requests(directory: RunDirectory) -> list[Request]:
    """Read and remove the present requests, by name. Raises SupersededError when another driver has taken over the
    directory: the requests are for that driver."""
    if directory.term is not None:
        directory.term.check()
    if not directory.control.is_dir():
        return []
    requests = []
    for path in sorted(directory.control.glob(f"*{REQUEST}"), key=lambda path: path.name):
        with suppress(OSError):  # withdrawn just now
            text = path.read_bytes()
            path.unlink()
            name = path.name.removesuffix(REQUEST)
            try:
                values = json.loads(text)
                requests.append(Request(name, str(values["what"]), dict(values["arguments"])))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                _reply(directory, name, {"refused": f"not a request: {error}"})
    return requests


def _refuse_old(directory: RunDirectory) -> None:
    for request in _take_requests(directory):
        _reply(directory, request.name, {"refused": "the run to which this request was made has ended"})


def _reply(directory: RunDirectory, name: str, reply: Mapping[str, Any]) -> None:
    with suppress(OSError, SupersededError):  # neither a full disk nor a takeover is this request's error
        write_atomically(directory.control / f"{name}{ANSWER}", json.dumps(reply).encode(), directory.term)
