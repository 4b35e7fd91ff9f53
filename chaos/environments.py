"""The environments of the runs with episodes. They write a journal for the witness, mark what the policy reads
(`chaos.witness.markers`), and fail once each time they are ordered to.

An order is a file beside the injection log. The driver writes it; the process that takes it away obeys it. Which rows
are played how is in their columns: `number`, `turns`, `role` of the answers, and whether they are `held_out`.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from chaos.reward_function import LONG_S, flood, fork
from chaos.witness.journals import ENVIRONMENT, JOURNALS, Journal
from chaos.witness.markers import Mark, first_mark

VARIABLE = "RLHF_RAY_CHAOS_INJECTION_LOG"
"""As `injection_log.INJECTION_LOG`, which is imported only to write it: a user's environment imports little."""
KILL, KILL_TWICE, HANG, HOLD, FLOOD, FORK, LEAK, STALL, PAUSE, STOP = (
    "kill", "kill_twice", "hang", "hold", "flood", "fork", "leak", "stall", "pause", "stop")
"""Orders: the process kills itself in a step, again while that step's episode is replayed; blocks, deaf to signals;
blocks in C code that holds the interpreter's lock; writes more than anybody reads; leaves child processes behind and
exits; allocates more and more; lets the episode's deadline pass; waits until it may go on; stops itself by SIGSTOP."""
KILL_IN_RESET, HANG_IN_RESET = IN_RESET = ("kill_in_reset", "hang_in_reset")
"""Orders for a reset."""
PAUSE_S = 6.0
"""Longest pause, in which a generator is lost."""
LEAK_BYTES = 16 * 2**20
POLL_S = 0.02
leaked: list[bytearray] = []
_logging = threading.Lock()
"""Held from the moment a file is taken until it is logged, and by what kills the process in a replay: that shall not
come between."""


def order_file(injections: Path) -> Path:
    """The file of an order."""
    return injections.with_suffix(".environment_order")


def order_failure(injections: Path, number: int, failure: str, environment: str = "", runner: int = 0) -> None:
    """Order the next call of this environment, or of any, to fail. `number` is the fault's, `runner` the process whose
    environments are meant; 0 for any."""
    _write(order_file(injections), {
        "fault": number, "failure": failure, "environment": environment, "runner": runner})


def paused_file(injections: Path, number: int) -> Path:
    """There from the time at which an environment pauses until it may go on."""
    return injections.with_suffix(f".paused_{number}")


class Played:
    """One episode of an environment: where it is, and what is done at each place."""

    def __init__(self, environment: str, row: int, seed: int, held_out: bool) -> None:
        self.environment, self.mark, self.held_out = environment, first_mark(row, seed), held_out
        self.path: list[Mark] = [self.mark]
        """All places up to this one."""
        self.journal = _journal(os.environ[JOURNALS], os.getpid())

    def begin(self) -> None:
        """The environment is reset: obey, and write it down."""
        self._obey(None)
        self._note("reset", mark=list(self.mark))
        self._recovered()

    def write(self, text: str) -> None:
        """The policy has written this in a turn: obey, and go on to the next place."""
        after = self.mark.after(text)
        self._obey(after)
        self.mark = after
        self.path.append(after)
        self._recovered()

    def answered(self, done: bool, role: str) -> None:
        """Write down how the turn is answered."""
        self._note("answered", mark=list(self.mark), done=done, role=role)

    def _note(self, event: str, **fields: Any) -> None:
        """Write a line of the journal."""
        self.journal.add(event, environment=self.environment, **fields)

    def _fits(self, failure: str, after: Mark | None) -> bool:
        """Whether a failure may come here. `after`: as in `_obey`."""
        if failure in IN_RESET or after is None:
            return failure in IN_RESET and after is None
        return after.turn >= 2 or failure == STALL  # something must have been played before

    def _unrecovered(self, failure: str, where: Mark) -> dict[str, Any]:
        """What shows that a failure at this place is over: the beginning of a place to which an episode comes."""
        return {"mark": list(where)}

    def _fail(self, failure: str) -> None:
        FAILURES[failure]()

    def _obey(self, after: Mark | None) -> None:
        """Fail, if that is ordered. `after`: the place after this turn; None in a reset."""
        place = os.environ.get(VARIABLE)
        if place is None or self.held_out:
            return
        injections = Path(place)
        if after is not None and (again := _again_file(injections)).exists():
            given = json.loads(_read(again) or "{}")
            with _logging:
                if list(after) in given.get("before", []) and _take(again) is not None:  # this is a replay
                    _log(injections, "confirmed", fault=given["fault"], state="killed again in the replay", seconds=0.0)
                    os.kill(os.getpid(), signal.SIGKILL)
        order = json.loads(_read(order_file(injections)) or "{}")
        if not order or order["environment"] not in ("", self.environment) or order["runner"] not in (0, _runner()):
            return
        failure = order["failure"]
        if not self._fits(failure, after) or _take(order_file(injections)) is None:
            return
        where = after or self.mark
        _log(injections, "confirmed", fault=order["fault"], seconds=0.0,
             state=f"{failure} in {'a reset' if after is None else f'turn {where.turn}'} of row {where.row}")
        if failure == KILL_TWICE:
            _write(_again_file(injections), {"fault": order["fault"], "before": [list(each) for each in self.path]})
        if failure not in (STALL, PAUSE):
            _write(_unrecovered_file(injections), {"fault": order["fault"], **self._unrecovered(failure, where)})
        if failure == STALL:
            self._note("stalled", mark=list(self.mark))
        if failure == PAUSE:
            _pause(paused_file(injections, order["fault"]))
        else:
            self._fail(failure)

    def _recovered(self) -> None:
        """Log it, if this is where an environment failed, and will not fail again."""
        place = os.environ.get(VARIABLE)
        if place is None or not (file := _unrecovered_file(Path(place))).exists() or _again_file(Path(place)).exists():
            return
        given = json.loads(_read(file) or "{}")
        with _logging:
            if self._shows_recovery(given) and _take(file) is not None:
                _log(Path(place), "recovered", fault=given["fault"])

    def _shows_recovery(self, given: dict[str, Any]) -> bool:
        """Whether a failure is over. `given`: what `_unrecovered` returned."""
        return "mark" in given and list(self.mark)[: len(given["mark"])] == given["mark"]


class Talk:
    """An environment in messages. Its answers follow from the seed and from what the policy wrote. With a chat template
    that writes the history again for a user, each answer of the role "user" begins a segment, and one of "tool" does
    not."""

    name = "talk"

    def reset(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        """Begin with a number of the seed's."""
        self.row, self.random = row, random.Random(seed)
        self.played = Played(self.name, row["number"], seed, row.get("held_out", False))
        self.played.begin()
        return {"messages": [{"role": "user", "content": f"{self.random.randrange(100)} {self.played.mark}"}]}

    def step(self, reply: Any) -> dict[str, Any]:
        """Count what the policy wrote."""
        self.played.write(reply.text)
        mark, role = self.played.mark, self.row["role"]
        done = mark.turn >= self.row["turns"]
        self.played.answered(done, role)
        message = {"role": role, "content": f"{len(reply.text)} {self.random.randrange(100)} {mark}"}
        if role == "tool":
            message |= {"name": "count", "tool_call_id": f"{mark.turn:09}"}
        return {"messages": [message], "reward": (mark.turn + len(reply.text) % 7) / 8, "done": done,
                "info": {"written": len(reply.text)}}


class Brief(Talk):
    """The same, where an episode may not take long."""

    name = "brief"


class Counter:
    """A class with tools that can be restored from a snapshot."""

    def reset(self, number: int, seed: int, held_out: bool = False) -> str:
        """Begin."""
        self.seed, self.total = seed, 0
        self.played = Played("counter", number, seed, held_out)
        self.played.begin()
        return f" {self.played.mark}"

    def put(self, n: int) -> str:
        """Add a number.

        Args:
            n: The number.
        """
        self.played.write(str(n))
        self.total += n
        self.played.answered(False, "tool")
        return f"{self.total} {self.played.mark}"

    def get_reward(self) -> float:
        """How much was added."""
        return self.total % 7 / 7

    def snapshot(self) -> dict[str, Any]:
        """All that `restore` needs."""
        return {"row": self.played.mark.row, "seed": self.seed, "total": self.total, "held_out": self.played.held_out,
                "path": [list(each) for each in self.played.path]}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot.

        Args:
            snapshot: What `snapshot` returned.
        """
        self.seed, self.total = snapshot["seed"], snapshot["total"]
        self.played = Played("counter", snapshot["row"], snapshot["seed"], snapshot["held_out"])
        self.played.path = [Mark(*each) for each in snapshot["path"]]
        self.played.mark = self.played.path[-1]


def tool_call(n: int) -> str:
    """How a policy writes that it calls `put`, in the format of these runs."""
    return f'<tool_call>\n{{"name": "put", "arguments": {{"n": {n}}}}}\n</tool_call>'


# Failures


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    """Block, whatever signal may be ignored comes."""
    ignore = ctypes.c_void_p(1)  # SIG_IGN; Python's own function works in the main thread only
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        library.signal(int(number), ignore)
    time.sleep(LONG_S)


def _hold() -> None:
    """Block in C code, with the interpreter's lock."""
    ctypes.PyDLL(None).sleep(int(LONG_S))


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _leak() -> None:
    """Allocate until there is no memory left, and keep it."""
    while True:
        leaked.append(bytearray(LEAK_BYTES))


def _stall() -> None:
    time.sleep(LONG_S)


FAILURES: dict[str, Callable[[], None]] = {
    KILL: _kill, KILL_TWICE: _kill, KILL_IN_RESET: _kill, HANG: _hang, HANG_IN_RESET: _hang, HOLD: _hold, FLOOD: flood,
    FORK: fork, LEAK: _leak, STALL: _stall, STOP: _stop}


def _pause(paused: Path) -> None:
    """Say that an episode is between two turns, and wait until the file is removed."""
    _write(paused, {})
    until = time.monotonic() + PAUSE_S
    while paused.exists() and time.monotonic() < until:
        time.sleep(POLL_S)


# Files


def _runner() -> int:
    """The process that has started this one: its last argument, or that of the process that has started this
    program."""
    if sys.argv[-1].isdecimal():
        return int(sys.argv[-1])
    with suppress(OSError, IndexError):
        last = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[-2].decode()
        return int(last) if last.isdecimal() else 0
    return 0


@cache
def _journal(directory: str, process: int) -> Journal:
    """The journal of this process."""
    return Journal(Path(directory), f"{ENVIRONMENT}_{process}")


def _unrecovered_file(injections: Path) -> Path:
    """Where an environment has failed, and has not answered since."""
    return injections.with_suffix(".environment_failed")


def _again_file(injections: Path) -> Path:
    """Which turns may not be replayed."""
    return injections.with_suffix(".environment_again")


def _write(file: Path, content: dict[str, Any]) -> None:
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(file)


def _read(file: Path) -> str:
    with suppress(FileNotFoundError):
        return file.read_text()
    return ""


def _take(file: Path) -> str | None:
    """Remove a file; its content. None if another process was faster."""
    mine = file.with_name(f"{file.name}.taken_{os.getpid()}")
    try:
        file.rename(mine)
    except FileNotFoundError:
        return None
    content = mine.read_text()
    mine.unlink()
    return content


def _log(place: Path, event: str, **fields: Any) -> None:
    from chaos.injection_log import InjectionLog

    InjectionLog(place).add(event, **fields)
