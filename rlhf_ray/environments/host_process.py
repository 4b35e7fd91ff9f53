"""One process with open episodes, as the process sees it that started it (`host.py` is what runs there)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Literal

from rlhf_ray.environments.answers import ANSWER_BYTES
from rlhf_ray.errors import EnvironmentFailed, with_lines
from rlhf_ray.user_code.process import AnswerTooLong, PrintedLines, UserProcess

IMPORT_S = 120.0
"""Longest time for the import of the user's code, which may import a whole framework."""
ANSWERING_S = 1.0
"""Time in which a process says where an episode hangs, unless C code holds the interpreter's lock."""
FRAME_BYTES = ANSWER_BYTES + 1000
"""Longest answer with what is around it."""
NO_ANSWER = (AnswerTooLong, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors where the first message of a process is read, whose user's code writes to our socket."""
SHOWN = 200
"""Characters that an error shows of an answer, or of what is none."""

Call = Literal["reset", "restore", "step", "reward", "run", "close"]
Answer = dict[str, Any]
FIELDS: Mapping[Call, Mapping[str, type | UnionType]] = {
    "reset": {"messages": list | None, "tools": list, "observation": str},
    "restore": {},
    "step": {"messages": list, "reward": float | int, "done": bool, "truncated": bool, "info": dict,
             "tool_errors": int},
    "reward": {"reward": float | int},
    "run": {"reward": float | int | None, "info": dict, "truncated": bool},
    "close": {},
}
"""Of the answer to each call, with their types in JSON."""


class HostLost(Exception):
    """The process of an episode is gone. `kind`: it was killed for a "neighbour", it "died" while this call alone was
    under way, it "died with several", it is "unclear" which of several calls was to blame for something else, or it was
    "stopped"."""

    def __init__(self, kind: Literal["neighbour", "died", "died with several", "unclear", "stopped"], ending: str
                 ) -> None:
        super().__init__(ending)
        self.kind, self.ending = kind, ending


class HostProcess:
    """A process with open episodes, from its start to its end."""

    def __init__(self, who: str, field: str, printed: PrintedLines, setup: dict[str, Any],
                 spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
                 on_lost: Callable[[HostProcess], None]) -> None:
        """
        Args:
            who: the environment as the subject of messages.
            field: of the configuration, "environments.NAME".
            setup: what `host.serve` reads first.
            spawn: runs a coroutine in the background.
            on_lost: is told once that it takes no more calls.
        """
        self.alone = False
        """It takes no second episode."""
        self.episodes: set[int] = set()
        """Numbers of the episodes that are in it."""
        self.tools: dict[int, str] = {}
        """The tool that runs now, by episode."""
        self.lost: HostLost | None = None
        """Set once it takes no more calls."""
        self._who, self._field, self._setup, self._spawn, self._on_lost = who, field, setup, spawn, on_lost
        self._source = setup["source"][0]
        self._process = UserProcess(who, printed)
        self._pid = 0
        self._under_way: dict[int, tuple[Call, asyncio.Future[Answer]]] = {}
        """By episode."""
        self._lines: dict[int, asyncio.Future[str]] = {}
        self.ready: asyncio.Task[Answer] = spawn(self._start())
        """The facts, once the user's code is loaded; raises EnvironmentFailed."""

    async def _start(self) -> Answer:
        loaded = False
        try:
            await self._process.start("rlhf_ray.environments.host", EnvironmentFailed)
            if self.lost is not None:
                raise EnvironmentFailed(f"{self._who} {self.lost.ending}")
            async with asyncio.timeout(IMPORT_S):
                self._process.send(self._setup)
                facts: Answer = json.loads(await self._process.receive(FRAME_BYTES))
            if "error" in facts:
                advice = "Correct the field, or start the program that it names"
                if self._source == "path":
                    advice = "Correct the path (module:name or file.py:name), or fix the code"
                raise EnvironmentFailed(with_lines(f"{self._field}.{self._source}: {self._who} cannot be used: "
                                                   f"{facts['error']}", "", advice))
            self._pid = facts.pop("pid")
            self._spawn(self._read())
            loaded = True
            return facts
        except TimeoutError:
            raise EnvironmentFailed(f"{self._field}.{self._source}: {self._who} was not imported within {IMPORT_S:g} "
                                    "s; its process was killed. Make the import faster") from None
        except (asyncio.IncompleteReadError, ConnectionError, *NO_ANSWER) as error:
            ending = self.lost.ending if self.lost else await self._ending(error)
            raise EnvironmentFailed(f"{self._field}.{self._source}: {self._who} {ending} when it was imported. Fix the "
                                    f"code, or raise {self._field}.memory_mib={self._setup['memory_mib']}") from None
        finally:
            if not loaded:
                self.give_up(HostLost("died", "was not started"))
                if self.lost is not None:  # it was given up before there was a process
                    await self._process.kill()

    def ask(self, number: int, call: Call, given: bytes) -> asyncio.Future[Answer]:
        """Send a call of an episode; its answer, or HostLost."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self.lost is not None:  # not through this call
            future.set_exception(HostLost("neighbour", self.lost.ending))
            return future
        self._under_way[number] = (call, future)
        self._process.send({"episode": number, "call": call, "given": given})
        return future

    def under_way(self, number: int) -> asyncio.Future[Answer] | None:
        """The answer to an episode's call, while it is awaited."""
        _, answer = self._under_way.get(number, (None, None))
        return answer

    @property
    def calls(self) -> int:
        """Number of calls under way."""
        return len(self._under_way)

    @property
    def stopped(self) -> bool:
        """It does not run: somebody has sent SIGSTOP."""
        with suppress(OSError):
            return Path(f"/proc/{self._pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
        return False

    async def line(self, number: int) -> str | None:
        """The user's line at which an episode's call is; None if the process does not answer."""
        if self.lost is not None:
            return None
        if number not in self._lines:
            self._lines[number] = asyncio.get_running_loop().create_future()
            self._process.send({"episode": number, "call": "where"})
        future = self._lines[number]
        await asyncio.wait([future], timeout=ANSWERING_S)
        return future.result() if future.done() and not future.cancelled() else None

    async def _read(self) -> None:
        try:
            while True:
                self._take(json.loads(await self._process.receive(FRAME_BYTES)))
        except Exception as error:  # it has ended, or the user's code writes to our socket
            ending = await self._ending(error)
        self.give_up(HostLost("died" if self.calls == 1 else "died with several", ending))

    async def _ending(self, error: Exception) -> str:
        """Why it takes no more calls after an error when an answer was read, as the predicate of a message."""
        if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
            return await self._process.ending()
        return f"sent what is no answer ({error})"

    def _take(self, message: Any) -> None:
        """Pass an answer on. Raises some error for anything else."""
        if "where" in message:
            _require(message, {"where": int, "line": str})
            line = self._lines.pop(message["where"], None)
            if line is not None and not line.done():
                line.set_result(message["line"])
        elif "tool" in message:
            _require(message, {"tool": int, "name": str})
            self.tools[message["tool"]] = message["name"]
        else:
            number = message["episode"]
            call, answer = self._under_way[number]
            if "error" in message:
                _require(message, {"episode": int, "error": str, "exhausted": str})
            else:
                _require(message, {"episode": int, "answer": dict, "snapshot": dict | None})
                _require(message["answer"], FIELDS[call])
            self.tools.pop(number, None)
            del self._under_way[number]
            answer.set_result(message)

    def give_up(self, lost: HostLost) -> asyncio.Task[None] | None:
        """Kill it. Calls under way raise `lost`. Returns a task that ends when it is gone; None if it was given up
        before."""
        if self.lost is not None:
            return None
        self.lost = lost
        idle = lost.kind == "stopped" and not self._under_way
        for _, answer in self._under_way.values():
            answer.set_exception(lost)
            answer.exception()  # perhaps nobody waits for it any more
        self._under_way.clear()
        self._on_lost(self)
        return self._spawn(self._process.end(idle=idle))


def _require(given: Mapping[str, Any], types: Mapping[str, type | UnionType]) -> None:
    """
    Raises:
        TypeError: it has other keys, or values of other types.
    """
    if given.keys() != types.keys():
        raise TypeError(f"its keys are {', '.join(given)[:SHOWN] or 'none'} in place of {', '.join(types)}")
    for name, kind in types.items():
        if not isinstance(given[name], kind):
            raise TypeError(f"its {name} is a {type(given[name]).__name__}")
