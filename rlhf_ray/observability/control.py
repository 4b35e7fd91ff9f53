"""Requests to a run that is going on, and what it answers: small files in `control/` of the run's directory.

A command writes `<id>.request.json`; the run takes it away, does what it asks, and writes `<id>.answer.json`. Whoever
may write into the run's directory may ask, nobody else, and any machine that sees the directory will do. What can be
asked is the business of those who answer: this file only carries questions and answers.
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
from rlhf_ray.observability.run_directory import RunDirectory

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Does what a request asks for with its arguments, and says what came of it; an RLHFError is its refusal."""

LOOK_EVERY_S = 0.5
SILENT_S = 15.0
"""A run that wrote no status for so long hangs or is gone."""
QUESTION, ANSWER = ".request.json", ".answer.json"


def ask(
    run_dir: Path, what: str, arguments: Mapping[str, Any] | None = None, timeout_s: float = 600.0
) -> dict[str, Any]:
    """Ask a run to do something, and wait until it has.

    Args:
        what: name of the request, e.g. "profile".
        arguments: anything that JSON holds.
        timeout_s: longest wait for the answer.

    Returns:
        What the run says that it did.

    Raises:
        ConfigError: no run is going on there, or it refuses.
        WorkerError: it gave no answer in time.
    """
    run = RunDirectory(run_dir)
    require_running(run)
    run.control.mkdir(exist_ok=True)
    name = uuid4().hex
    question, answer = run.control / f"{name}{QUESTION}", run.control / f"{name}{ANSWER}"
    write_atomically(question, json.dumps({"what": what, "arguments": dict(arguments or {})}).encode())
    try:
        said = _awaited(run, answer, what, time.monotonic() + timeout_s, timeout_s)
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    if "refused" in said:
        raise ConfigError(said["refused"])
    return dict(said["done"])


def require_running(run: RunDirectory) -> None:
    """Refuse a directory in which no run is going on.

    Raises:
        ConfigError: saying what is known of the run instead.
    """
    try:
        live = json.loads(run.status.read_text())
    except (OSError, ValueError):
        raise ConfigError(f"no run is going on in {run.path}: {run.status.name} is not there. Name the directory of a "
                          "PPO run (its run.dir) once its workers are ready") from None
    if "ended" in live:
        raise ConfigError(f"the run in {run.path} is over ({live['ended']}); only one that is going on can be asked")
    if (silent := time.time() - live.get("time", 0.0)) > SILENT_S:
        raise ConfigError(f"the run in {run.path} has said nothing for {silent:.0f} s: it hangs or is gone")


def _awaited(run: RunDirectory, answer: Path, what: str, deadline: float, timeout_s: float) -> dict[str, Any]:
    while time.monotonic() < deadline:
        if answer.exists():
            return dict(json.loads(answer.read_text()))
        require_running(run)
        time.sleep(LOOK_EVERY_S / 2)
    raise WorkerError(f"the run in {run.path} did not answer to {what!r} within {timeout_s:g} s; "
                      "`rlhf-ray status` says what it is doing")


class Question(NamedTuple):
    """A request that was taken."""

    name: str
    what: str
    arguments: Mapping[str, Any]


@asynccontextmanager
async def answering(
    directory: RunDirectory, handlers: Mapping[str, Handler], on_failure: OnFailure = log_failure
) -> AsyncIterator[None]:
    """Answer requests while the enclosed work goes on; each as a task of its own, so that they do not wait for each
    other. Those that were made to an earlier process are refused.

    Args:
        on_failure: called where requests cannot be read.
    """
    records = directory.files.records
    await records.run(_refuse_old, directory)
    tasks: set[asyncio.Task[None]] = set()
    try:
        async with background_task("the answering of requests",
                                   lambda: _keep_looking(directory, handlers, tasks), on_failure):
            yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(DiskStalled):  # as the run itself says
            await records.run(_refuse_old, directory)


async def _keep_looking(
    directory: RunDirectory, handlers: Mapping[str, Handler], tasks: set[asyncio.Task[None]]
) -> None:
    while True:
        for question in await directory.files.records.run(_taken, directory):
            task = asyncio.create_task(_answer(directory, question, handlers), name=f"control {question.what}")
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(LOOK_EVERY_S)


async def _answer(directory: RunDirectory, question: Question, handlers: Mapping[str, Handler]) -> None:
    said: dict[str, Any] = {"refused": f"the run ended before it had done what {question.what!r} asks for"}
    try:
        if (handler := handlers.get(question.what)) is None:
            said = {"refused": f"this run does not know {question.what!r}; it knows {', '.join(sorted(handlers))}"}
        else:
            said = {"done": dict(await handler(question.arguments))}
    except RLHFError as error:
        said = {"refused": str(error)}
    except Exception as bug:  # whoever asks must not wait for ever, nor the run end for it
        said = {"refused": f"{question.what!r} failed: {type(bug).__name__}: {bug}"}
    finally:
        directory.files.records.submit(_say, directory, question.name, said)


def _taken(directory: RunDirectory) -> list[Question]:
    """Requests that are there, by name; their files are taken away. Those made to a driver that has taken over the
    directory are its own business: SupersededError."""
    if directory.term is not None:
        directory.term.check()
    if not directory.control.is_dir():
        return []
    found = []
    for path in sorted(directory.control.glob(f"*{QUESTION}"), key=lambda path: path.name):
        with suppress(OSError):  # withdrawn this moment
            text = path.read_bytes()
            path.unlink()
            name = path.name.removesuffix(QUESTION)
            try:
                asked = json.loads(text)
                found.append(Question(name, str(asked["what"]), dict(asked["arguments"])))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                _say(directory, name, {"refused": f"not a request: {error}"})
    return found


def _refuse_old(directory: RunDirectory) -> None:
    for question in _taken(directory):
        _say(directory, question.name, {"refused": "the run that this was asked of has ended"})


def _say(directory: RunDirectory, name: str, said: Mapping[str, Any]) -> None:
    with suppress(OSError, SupersededError):  # a full disk is no reason to end a run; who asks now asks another driver
        write_atomically(directory.control / f"{name}{ANSWER}", json.dumps(said).encode(), directory.term)
