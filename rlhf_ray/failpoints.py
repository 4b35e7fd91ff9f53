"""Failpoints: named points at which a run ends at once, or its disk hangs, to test that it recovers. Nothing happens
unless the environment has `RLHF_RAY_FAILPOINT=NAME:exit` (or `NAME:exit:3`: when it is reached the third time).

`exit` ends the process as `kill -9` does, without handlers or `finally`, but with an exit code of its own. `hang`
blocks the thread that reaches the point until the variable is removed from the process's environment, like a disk that
hangs. Only `fsync` supports it, which is reached in threads of its own and may name a file (`fsync@metrics.jsonl:hang`,
a shell pattern).
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from fnmatch import fnmatch
from typing import NamedTuple

from rlhf_ray.errors import ConfigError

VARIABLE = "RLHF_RAY_FAILPOINT"
EXIT_CODE = 86
"""Exit code of a process that ended at a failpoint."""
POINTS = {
    "update_consumed": "an update is made and in the ledger; its weights are not published",
    "publication_begun": "some buckets of new weights are being sent to the generators",
    "publication_over": "every generator confirmed new weights; no row of metrics is written",
    "checkpoint_copied": "all state of a checkpoint is copied; ranks write their parts",
    "checkpoint_unlisted": "all parts of a checkpoint are on disk; it has no manifest",
    "checkpoint_unnamed": "a checkpoint has its manifest; it is not renamed yet",
    "checkpoint_uncommitted": "a checkpoint is complete; the ledger has not recorded it",
}
"""The state of the run at each point."""
FSYNC = "fsync"
"""The point before every flush of a file, in the driver and in workers."""
HANG_LOOK_S = 0.02
_reached: Counter[str] = Counter()
_hanging: set[int] = set()


class Failpoint(NamedTuple):
    """An armed failpoint."""

    name: str
    visit: int
    """It acts when it is reached for this time, counted from 1."""
    action: str = "exit"
    file: str = "*"
    """Pattern of the names of files that count, at `fsync`."""


def armed() -> Failpoint | None:
    """The failpoint in the environment.

    Raises:
        ConfigError: the variable is not of the form NAME:exit or NAME:exit:N, or names an unknown point.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    place, _, action = text.partition(":")
    name, _, file = place.partition("@")
    action, _, visit = action.partition(":")
    known = (name in POINTS and not file and action == "exit") or (name == FSYNC and action in ("exit", "hang"))
    if not known or (visit and not (visit.isdecimal() and int(visit) > 0)):
        raise ConfigError(f"{VARIABLE}={text!r} names no failpoint: write NAME:exit, or NAME:exit:N for the N-th time "
                          f"that it is reached, with one of {', '.join(POINTS)}; or {FSYNC}:hang, or "
                          f"{FSYNC}@FILE:hang for the flush of one file; or unset it")
    return Failpoint(name, int(visit or 1), action, file or "*")


def reached(name: str, file: str = "") -> None:
    """A failpoint: ends the process or blocks this thread, if it is armed.

    Args:
        file: name of the file that is flushed, at `fsync`.
    """
    if VARIABLE not in os.environ:
        return
    point = armed()
    if point is None or point.name != name or not fnmatch(file, point.file):
        return
    _reached[name] += 1
    if _reached[name] < point.visit:
        return
    if point.action == "hang":
        _hang(point)
    elif _reached[name] == point.visit:
        os._exit(EXIT_CODE)


def hanging() -> frozenset[int]:
    """Threads of this process that hang at a failpoint, by `threading.get_ident`."""
    return frozenset(_hanging)


def _hang(point: Failpoint) -> None:
    _hanging.add(threading.get_ident())
    try:
        while armed() == point:
            time.sleep(HANG_LOOK_S)
    finally:
        _hanging.discard(threading.get_ident())
