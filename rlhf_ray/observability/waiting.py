"""Why does it wait? For every role, which other roles it waited for, so that shares add up to all of its time.

Experience travels in a circle: generators, frozen scorers, forward passes of the learners, assembler, updates, and with
new weights back to the generators. A worker that has nothing to do waits for the nearest busy role upstream of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.observability.spans import Span, Timeline, timeline

BUSY = "busy"
COORDINATOR = "coordinator"
"""What a worker waits for while nobody works."""
CIRCLE = (
    ("generator",), ("reference_scorer", "reward_scorer"), ("assembler",), ("policy_learner", "critic_learner"),
)
"""Roles by station, downstream. Stations that a run lacks are passed over."""


def waiting_shares(
    spans: Iterable[Span], start: float, end: float, workers: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """What the workers of each role did between `start` and `end`, as shares of their time.

    Args:
        spans: work of the roles in `workers`; others are ignored, parts outside the window too.
        workers: number of workers by role, at least one each.

    Returns:
        For each role: its share under "busy", and under each other role's name the share it waited for that one. Its
        own name stands for waiting while other workers of the role work, "coordinator" for time in which nobody does.
        Each role's shares sum to 1; those of 0 are left out.

    Raises:
        ValueError: the window is empty.
    """
    if end <= start:
        raise ValueError(f"no time to sum up: window {start:.6f}..{end:.6f}")
    line, shares = timeline(spans, start, end, workers), {}
    for role, count in workers.items():
        working = np.minimum(line.busy[role], count)
        idle = line.seconds * (count - working)
        seconds = {BUSY: line.seconds @ working, **{cause: idle[when].sum() for cause, when in _causes(role, line)}}
        whole = count * (end - start)
        shares[role] = {cause: share for cause, s in seconds.items() if (share := float(s / whole)) > 0}
    return shares


def mean_shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Shares of each role's time over several steps, from their metrics `share/<role>/<what>` and `time/step`."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        for name, share in row.items():
            if name.startswith("share/") and share is not None:
                _, role, what = name.split("/")
                seconds[role][what] += share * row["time/step"]
    return {role: {what: s / sum(its.values()) for what, s in its.items()} for role, its in seconds.items()}


def bottleneck(shares: Mapping[str, Mapping[str, float]]) -> str | None:
    """The role that is busy for the largest share of its time; None without roles."""
    return max(shares, key=lambda role: shares[role].get(BUSY, 0.0), default=None)


def _causes(role: str, line: Timeline) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """What an idle worker of `role` waits for, and [S] in which stretches: the nearest busy role upstream, of several
    the one with most busy workers; its own role last, and the coordinator while nobody works."""
    left = np.ones(len(line.seconds), np.bool_)
    for station in _upstream(role):
        present = [r for r in station if r in line.busy]
        if present:
            busy = np.stack([line.busy[r] for r in present])
            works, most = left & busy.any(0), busy.argmax(0)
            yield from ((r, works & (most == i)) for i, r in enumerate(present))
            left &= ~works
    yield COORDINATOR, left


def _upstream(role: str) -> Sequence[Sequence[str]]:
    """Stations from the one before `role`'s backwards around the circle, other roles of its station, then itself."""
    at = next((i for i, station in enumerate(CIRCLE) if role in station), 0)
    others = [r for r in CIRCLE[at] if r != role]
    return [*(CIRCLE[at - back] for back in range(1, len(CIRCLE))), others, [role]]
