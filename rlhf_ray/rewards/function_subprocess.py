"""The process that runs a user's reward function: it loads the function and calls it for each request.

Started as a program of its own, with the number of an open socket as its argument. Requests are pickles, answers are
JSON, so that nothing from this process is ever unpickled. It ends when the socket closes, and is killed with the
process that started it. It imports the standard library alone; the function imports what it needs.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

HEADER = struct.Struct("!Q")
"""Length of the frame that follows, in bytes."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ERROR_LENGTH = 2000
"""Longest text of an error, in characters."""


def main(descriptor: int, parent: int) -> None:
    """Serve the socket of that number until it closes, or until the process `parent` dies."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the function starts stays below this process, and is killed with it
    if os.getppid() != parent:  # the parent died before the line above
        return
    serve(socket.socket(fileno=descriptor))


def serve(socket_to_caller: socket.socket) -> None:
    """Load the function that the first frame names, and call it for each later frame, until the socket closes."""
    with socket_to_caller as channel, asyncio.Runner() as runner:
        setup = receive(channel)
        if setup is None:
            return
        try:
            function = load(setup["function"])
            names = accepted(function, setup["offers"])
        except BaseException as error:
            send(channel, {"error": describe(error)})
            return
        send(channel, {"takes": names})
        while (arguments := receive(channel)) is not None:
            send(channel, answer(function, {name: arguments[name] for name in names}, runner))


def answer(function: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    """The function's result as {"scores": [...]}, or {"error": ..., "sample": number of the row or None}."""
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = runner.run(_awaited(result))
        return {"scores": plain(result, max((len(given) for given in arguments.values()), default=0))}
    except BaseException as error:  # also SystemExit: it is reported and does not end the process
        sample = getattr(error, "sample", None)
        return {"error": describe(error), "sample": sample if isinstance(sample, int) else None}


def plain(result: Any, rows: int) -> list[float]:
    """A list, tuple, array or tensor of numbers as floats. An iterator may have no end: of one, no more are taken than
    show that they are too many for `rows`.

    Raises:
        TypeError: it is none of these, or contains something else.
    """
    if isinstance(result, (str, bytes, dict)) or not hasattr(result, "__iter__"):
        raise TypeError(f"it returned {_brief(result)}, and must return a list with one number per response")
    scores = []
    for place, item in enumerate(result if hasattr(result, "__len__") else islice(result, rows + 1)):
        try:
            if isinstance(item, (str, bytes)):
                raise TypeError
            scores.append(float(item))
        except (TypeError, ValueError):
            raise TypeError(f"score {place} of its list is {_brief(item)}, and must be a number") from None
    return scores


def load(target: str) -> Callable[..., Any]:
    """The function that `module:name` or `file.py:name` names. Modules are searched in the working directory, and for a
    file beside it too, after the standard library and installed packages.

    Raises:
        ValueError, TypeError, and whatever the import raises.
    """
    where, colon, name = target.rpartition(":")
    if not (where and colon and name):
        raise ValueError(f"{target!r} is not of the form module:name or file.py:name")
    sys.path.append(os.getcwd())
    target_object: Any = _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    for part in name.split("."):
        target_object = getattr(target_object, part)
    if not callable(target_object):
        raise TypeError(f"{name} is {_brief(target_object)}, which cannot be called")
    return target_object


def accepted(function: Callable[..., Any], offers: list[str]) -> list[str]:
    """Which of the arguments on offer the function takes: those it names, or all with `**kwargs`.

    Raises:
        TypeError: it takes none of them, or requires others.
    """
    parameters = inspect.signature(function).parameters.values()
    if required := [p.name for p in parameters
                   if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                   and (p.name not in offers or p.kind == p.POSITIONAL_ONLY)]:
        raise TypeError(f"it requires {', '.join(required)}; it is called with keyword arguments from "
                        f"{', '.join(offers)}")
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return offers
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not taken & set(offers):
        raise TypeError(f"it takes none of {', '.join(offers)}")
    return [name for name in offers if name in taken]


def describe(error: BaseException) -> str:
    """An exception with the line of the user's code that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__
              and "importlib" not in f.filename]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:ERROR_LENGTH]}{place}"


def receive(channel: socket.socket) -> Any:
    """The next request; None when the socket is closed."""
    header = _exactly(channel, HEADER.size)
    body = _exactly(channel, HEADER.unpack(header)[0]) if header else None
    return pickle.loads(body) if body else None  # noqa: S301 - from the process that started this one


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send an answer; NaN and infinity are written as Python's JSON does."""
    body = json.dumps(message).encode()
    channel.sendall(HEADER.pack(len(body)) + body)


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path} (relative paths start at {Path.cwd()})")
    sys.path.append(str(path.resolve().parent))
    name = path.stem
    while _is_taken(name, path):
        name = f"user_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_taken(name: str, path: Path) -> bool:
    """Whether `import NAME` is to find another module than the file."""
    if name in sys.modules or name in sys.stdlib_module_names:
        return True
    found = importlib.machinery.PathFinder.find_spec(name)
    return found is not None and found.origin != str(path.resolve())


async def _awaited(result: Any) -> Any:
    return await result


def _brief(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
