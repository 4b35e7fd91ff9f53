"""Why does it wait? For every role, which other roles it waited for, so that shares add up to all of its time.

Experience travels in a circle: generators, frozen scorers, forward passes of the learners, assembler, updates, and with
new weights back to the generators. A worker that has nothing to do waits for the nearest busy role upstream of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_ray.observability.spans import Span

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
    seconds: dict[str, dict[str, float]] = {role: defaultdict(float) for role in workers}
    calls: Counter[tuple[str, int]] = Counter()  # of each worker, under way
    busy: Counter[str] = Counter()  # working workers by role
    reached = start
    for moment, role, worker, change in _changes(spans, start, end, workers):
        _note(seconds, moment - reached, busy, workers)
        reached = moment
        was, calls[role, worker] = calls[role, worker], calls[role, worker] + change
        busy[role] += bool(calls[role, worker]) - bool(was)
    _note(seconds, end - reached, busy, workers)
    return {role: {cause: share for cause, s in causes.items() if (share := s / (workers[role] * (end - start))) > 0}
            for role, causes in seconds.items()}


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


def _changes(
    spans: Iterable[Span], start: float, end: float, workers: Mapping[str, int]
) -> list[tuple[float, str, int, int]]:
    """(moment, role, worker, +1 or -1) in order of time."""
    inside = [s for s in spans if s.role in workers and s.end > start and s.start < end]
    return sorted([(max(s.start, start), s.role, s.worker, 1) for s in inside]
                  + [(min(s.end, end), s.role, s.worker, -1) for s in inside])


def _note(seconds: dict[str, dict[str, float]], length: float, busy: Counter[str], workers: Mapping[str, int]) -> None:
    """Add `length` seconds in which nothing changed; `busy` counts the working workers by role."""
    for role, count in workers.items():
        working = min(busy[role], count)
        seconds[role][BUSY] += length * working
        if working < count:
            seconds[role][_cause(role, busy)] += length * (count - working)


def _cause(role: str, busy: Mapping[str, int]) -> str:
    """The nearest busy role upstream of an idle worker, its own role last."""
    for station in _upstream(role):
        working = [r for r in station if busy.get(r)]
        if working:
            return max(working, key=lambda r: busy[r])
    return COORDINATOR


def _upstream(role: str) -> Sequence[Sequence[str]]:
    """Stations from the one before `role`'s backwards around the circle, other roles of its station, then itself."""
    at = next((i for i, station in enumerate(CIRCLE) if role in station), 0)
    others = [r for r in CIRCLE[at] if r != role]
    return [*(CIRCLE[at - back] for back in range(1, len(CIRCLE))), others, [role]]
