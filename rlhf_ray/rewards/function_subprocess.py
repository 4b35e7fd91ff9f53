"""The process that runs a user's reward function: it loads the function and calls it for each request.

Started by a keeper (`user_code.keeper`), with the number of an open socket as its argument. Requests are pickles,
answers are JSON, so that nothing from this process is ever unpickled. It ends when the socket closes. It imports the
standard library alone; the function imports what it needs.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from rlhf_ray.user_code.frames import print_by_lines, receive, send
from rlhf_ray.user_code.loading import brief, definition, describe, load

SEARCH_S = 1.0
"""How long the row that made a call fail is searched for."""
COMPLETIONS = ("prompts", "completions", "completion_ids")
"""What a function gets that is written for TRL, beside the columns of the rows."""
OF_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")
"""Further arguments that TRL's trainer passes, which only it has."""


def main(descriptor: int) -> None:
    """Serve the socket of that number until it closes."""
    serve(socket.socket(fileno=descriptor))


def serve(socket_to_caller: socket.socket) -> None:
    """Load the function that the first frame names, and call it for each later frame, until the socket closes."""
    print_by_lines()
    with socket_to_caller as channel, asyncio.Runner() as runner:
        setup = receive(channel)
        if setup is None:
            return
        try:
            function = load(setup["function"])
            if not callable(function):
                name = setup["function"].rpartition(":")[2]
                raise TypeError(f"{name} is {brief(function)}, which cannot be called")
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
        raise TypeError(f"it returned {brief(result)}, and must return a list with one number per response")
    scores = []
    for place, item in enumerate(result if hasattr(result, "__len__") else islice(result, rows + 1)):
        try:
            if isinstance(item, (str, bytes)):
                raise TypeError
            scores.append(float(item))
        except (TypeError, ValueError):
            raise TypeError(f"score {place} of its list is {brief(item)}, and must be a number") from None
    return scores


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


async def _awaited(result: Any) -> Any:
    return await result
