"""Named places at which a run can be made to end at once, to see that it goes on from there. Nothing happens unless
`RLHF_RAY_FAILPOINT=NAME:exit` (or `NAME:exit:3`: when it is reached the third time) is in the environment.

The process ends as `kill -9` ends it, no handler and no `finally` runs, but for the exit code, by which whoever armed
the point knows that it was this one.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import NamedTuple

from rlhf_ray.errors import ConfigError

VARIABLE = "RLHF_RAY_FAILPOINT"
EXIT_CODE = 86
"""Of a process that ended at a failpoint."""
POINTS = {
    "update_consumed": "an update is made and in the ledger; its weights are not published",
    "publication_begun": "some buckets of new weights are on their way to the generators",
    "publication_over": "every generator confirmed new weights; no row of metrics is written",
    "checkpoint_copied": "all state of a checkpoint is copied; ranks write their parts",
    "checkpoint_unlisted": "all parts of a checkpoint are on disk; it has no manifest",
    "checkpoint_unnamed": "a checkpoint has its manifest; it is not in its place",
    "checkpoint_uncommitted": "a checkpoint is in its place; the ledger does not know of it",
}
"""What is true at each."""
_reached: Counter[str] = Counter()


class Failpoint(NamedTuple):
    """The one that is armed."""

    name: str
    visit: int
    """At which time of being reached the process ends, counted from 1."""


def armed() -> Failpoint | None:
    """What the environment asks for.

    Raises:
        ConfigError: it is not of the form NAME:exit or NAME:exit:N, or there is no such point.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    name, _, action = text.partition(":")
    action, _, visit = action.partition(":")
    if name not in POINTS or action != "exit" or (visit and not (visit.isdecimal() and int(visit) > 0)):
        raise ConfigError(f"{VARIABLE}={text!r} names no failpoint: write NAME:exit, or NAME:exit:N for the N-th time "
                          f"that it is reached, with one of {', '.join(POINTS)}; or unset it")
    return Failpoint(name, int(visit or 1))


def reached(name: str) -> None:
    """The run is at a failpoint: the process ends here if it is armed."""
    point = armed()
    if point is None or point.name != name:
        return
    _reached[name] += 1
    if _reached[name] == point.visit:
        os._exit(EXIT_CODE)
