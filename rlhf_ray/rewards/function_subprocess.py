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
import linecache
import os
import pickle
import signal
import socket
import struct
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

HEADER = struct.Struct("!Q")
"""Length of the frame that follows, in bytes."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ERROR_LENGTH = 2000
"""Longest text of an error, in characters."""
CODE_LENGTH = 200
"""Longest line of code that an error shows, in characters."""
SEARCH_S = 1.0
"""How long the row that made a call fail is searched for."""
COMPLETIONS = ("prompts", "completions", "completion_ids")
"""What a function gets that is written for TRL, beside the columns of the rows."""
OF_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")
"""Further arguments that TRL's trainer passes, which only it has."""
LIBRARIES = ("<", *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""How file names begin whose code is not the user's."""
PACKAGE = str(Path(__file__).parents[1]) + os.sep


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
    for stream in (sys.stdout, sys.stderr):  # a pipe: what is printed would wait for more
        with suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with socket_to_caller as channel, asyncio.Runner() as runner:
        setup = receive(channel)
        if setup is None:
            return
        try:
            function = load(setup["function"])
            send(channel, {**accepted(function, setup["offers"], setup["columns"]), "place": definition(function)})
        except BaseException as error:
            send(channel, {"error": describe(error)})
            return
        while (arguments := receive(channel)) is not None:
            reply = answer(function, arguments, runner)
            with suppress(Exception):  # the function may have replaced or closed it
                sys.stdout.flush()
            send(channel, reply)


def answer(function: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    """The function's result as {"scores": [...]}, or {"error": ..., "sample": number of the row or None}."""
    try:
        return {"scores": _scores(function, arguments, runner)}
    except BaseException as error:  # also SystemExit: it is reported and does not end the process
        sample = getattr(error, "sample", None)
        if not isinstance(sample, int):
            sample = _culprit(function, arguments, runner, type(error))
        return {"error": describe(error), "sample": sample}


def _scores(function: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner) -> list[float]:
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = runner.run(_awaited(result))
    return plain(result, _rows(arguments))


def _rows(arguments: dict[str, Any]) -> int:
    return max((len(given) for given in arguments.values() if isinstance(given, list)), default=0)


def _culprit(function: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner,
             kind: type[BaseException]) -> int | None:
    """The first row for which the function fails alike when it is called with that row alone; None if none is found."""
    until = time.monotonic() + SEARCH_S
    for row in range(_rows(arguments)):
        if time.monotonic() > until:
            return None
        alone = {name: given[row : row + 1] if isinstance(given, list) else given for name, given in arguments.items()}
        try:
            _scores(function, alone, runner)
        except BaseException as error:
            if type(error) is kind:
                return row
    return None


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


def accepted(function: Callable[..., Any], offers: Sequence[str], columns: bool = False) -> dict[str, Any]:
    """What the function takes, by its signature: {"columns": ..., "named": [...], "required": [...], "all": ...}.

    `columns` is whether it is written for TRL: it gets `COMPLETIONS` and the columns of the rows instead of `offers`.
    That is so if it names completions, or requires others than `offers` and names none that are offered only there.
    `all` is whether it takes all that there is (`**kwargs`).

    Args:
        columns: functions for TRL are accepted.

    Raises:
        TypeError: it takes none of the arguments, or requires others.
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in parameters
                if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    other = [name for name in required if name not in offers or name not in named]
    own = set(named) & (set(offers) - set(COMPLETIONS))
    if columns and ({"completions", "completion_ids"} & set(named) or (other and not own)):
        if missing := [name for name in required if name in OF_TRAINER or name not in named]:
            raise TypeError(f"it requires {', '.join(missing)}; it is called with keyword arguments: "
                            f"{', '.join(COMPLETIONS)}, and the columns of the prompts' rows")
        return {"columns": True, "named": named, "required": required, "all": takes_all}
    if other:
        fix = "; columns of the rows are in labels, or take completions instead, as for TRL" if columns else ""
        raise TypeError(f"it requires {', '.join(other)}; it is called with keyword arguments from "
                        f"{', '.join(offers)}{fix}")
    if not takes_all and not set(named) & set(offers):
        raise TypeError(f"it takes none of {', '.join(offers)}")
    return {"columns": False, "named": named, "required": required, "all": takes_all}


def definition(function: Callable[..., Any]) -> str:
    """File, line and code of a function's first line, as in `describe`; "" for one without."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _line(code.co_filename, code.co_firstlineno) if code else ""


def describe(error: BaseException) -> str:
    """An exception, and below it file, line and code of the user's line that raised it."""
    text = f"{type(error).__name__}: {str(error)[:ERROR_LENGTH]}".removesuffix(": ")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg}\n  {_line(error.filename, error.lineno or 1)}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(PACKAGE)
              and "importlib" not in f.filename]
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    if not frames:
        return text
    frame = (own or frames)[-1]
    return f"{text}\n  {_line(frame.filename, frame.lineno or 1)}"


def _line(file: str, number: int) -> str:
    """A line of code with its place; the path is relative if it is below the working directory."""
    code = linecache.getline(file, number).strip()
    shown = code if len(code) <= CODE_LENGTH else f"{code[:CODE_LENGTH]} ..."
    with suppress(ValueError, OSError):
        file = str(Path(file).resolve().relative_to(Path.cwd()))
    return f"{file}:{number}: {shown}" if shown else f"{file}:{number}"


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
