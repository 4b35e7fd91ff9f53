"""A user's reward function that gives small scores, except for one call each time it is ordered to fail.

An order is a file beside the injection log. The driver writes it; the function deletes it when it obeys. Reward scorers
run the function in a process of its own, which they kill when it fails.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "RLHF_RAY_CHAOS_INJECTION_LOG"
"""As `injection_log.INJECTION_LOG`, which is imported only to write it: a user's function imports little."""
HANG, FORK, FLOOD = "hang", "fork", "flood"
LONG_S = 3600.0
CHILDREN = 8
FLOOD_BYTES = 32 * 2**20
MODULUS = 7


def score(responses: list[str]) -> list[float]:
    """A number from 0 to 1 by the length of each response."""
    place = Path(os.environ[VARIABLE])
    if (order := order_file(place)).exists():
        number, _, failure = order.read_text().partition(" ")
        order.unlink()
        _log(place, "confirmed", fault=int(number), state=failure, seconds=0.0)
        unrecovered_file(place).write_text(number)
        FAILURES[failure]()
    elif (unrecovered := unrecovered_file(place)).exists():
        _log(place, "recovered", fault=int(unrecovered.read_text()))
        unrecovered.unlink()
    return [len(response) % MODULUS / MODULUS for response in responses]


def order_file(injections: Path) -> Path:
    """The file of an order."""
    return injections.with_suffix(".function_order")


def unrecovered_file(injections: Path) -> Path:
    """The file with the number of the fault after which no call has succeeded yet."""
    return injections.with_suffix(".function_failed")


def order_failure(injections: Path, number: int, failure: str) -> None:
    """Order the next call to fail: to HANG, FORK or FLOOD. `number` is the fault's."""
    unfinished = order_file(injections).with_suffix(".new")
    unfinished.write_text(f"{number} {failure}")
    unfinished.replace(order_file(injections))


def _hang() -> None:
    """Block without an answer, whatever signal may be ignored comes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(LONG_S)


def fork() -> None:
    """Leave child processes behind that hold the socket of the call, and exit."""
    for _ in range(CHILDREN):
        if os.fork() == 0:
            time.sleep(LONG_S)
            os._exit(0)
    os._exit(3)


def flood() -> None:
    """Write more than anybody reads."""
    line = b"x" * 1023 + b"\n"
    for _ in range(FLOOD_BYTES // len(line) // 2):
        os.write(sys.stdout.fileno(), line)
        os.write(sys.stderr.fileno(), line)


FAILURES = {HANG: _hang, FORK: fork, FLOOD: flood}


def _log(place: Path, event: str, **fields: Any) -> None:
    from chaos.injection_log import InjectionLog

    InjectionLog(place).add(event, **fields)
