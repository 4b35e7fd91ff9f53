"""Where time goes: which role limits the run, what the other roles wait for, and which setting to change first.

Experience travels in a circle: generators, frozen scorers, forward passes of the learners, assembler, updates, and with
new weights back to the generators. An idle worker is said to wait for the nearest busy role upstream of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.run import STATIONS
from rlhf_ray.config.stages import PPOConfig, role_facts
from rlhf_ray.observability.spans import Span, Timeline, timeline

BUSY = "busy"
COORDINATOR = "coordinator"
"""What workers wait for while no role works."""
FACTS = role_facts(PPOConfig)
"""Facts of all roles, by section."""
CIRCLE = tuple(
    tuple(facts.worker for facts in FACTS.values() if facts.station == station) for station in STATIONS
)
"""Roles by station of the circle, downstream, by the names of their workers. Stations that a run lacks are skipped."""
PUBLISH = "publish"
"""Phase of the publication of weights, in which learners and generators work."""


def _phases() -> Iterator[tuple[str, str]]:
    for station in STATIONS:
        if station == "assembly":  # it needs the learners' forward passes
            yield from ((facts.passes, section) for section, facts in FACTS.items() if facts.passes)
        yield from ((facts.phase, section) for section, facts in FACTS.items() if facts.station == station)


PHASES = dict(_phases())
"""Section of the role that does each kind of work of a step, in the order of a step; without `PUBLISH`."""


def waiting_shares(
    spans: Iterable[Span], start: float, end: float, workers: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """What the workers of each role did between `start` and `end`, as shares of their time.

    Args:
        spans: work of the roles in `workers`; other roles are ignored, and parts outside the window too.
        workers: number of workers by role, at least one each.

    Returns:
        For each role: its share under "busy", and under each other role's name the share it waited for that role. Its
        own name stands for waiting while other workers of the role work, "coordinator" for time in which no role works.
        Each role's shares sum to 1; shares of 0 are left out.

    Raises:
        ValueError: the window is empty.
    """
    if end <= start:
        raise ValueError(f"the window has no time in it: {start:.6f}..{end:.6f}")
    line = timeline(spans, start, end, workers)
    shares = {}
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
    """What an idle worker of `role` waits for, and [S] in which intervals: the nearest busy role upstream, of several
    the one with most busy workers; then its own role, and the coordinator while no role works."""
    left = np.ones(len(line.seconds), np.bool_)
    for station in _upstream(role):
        present = [r for r in station if r in line.busy]
        if present:
            busy = np.stack([line.busy[r] for r in present])
            works = left & busy.any(0)
            most = busy.argmax(0)
            yield from ((r, works & (most == i)) for i, r in enumerate(present))
            left &= ~works
    yield COORDINATOR, left


def _upstream(role: str) -> Sequence[Sequence[str]]:
    """Roles grouped by station, from the one before `role`'s backwards around the circle; then the other roles of its
    station, then itself."""
    at = next((i for i, station in enumerate(CIRCLE) if role in station), 0)
    others = [r for r in CIRCLE[at] if r != role]
    return [*(CIRCLE[at - back] for back in range(1, len(CIRCLE))), others, [role]]


Shares = Mapping[str, Mapping[str, float]]

NOTICEABLE = 0.15
"""A share of time below which a change would hardly matter."""
DISTURBED = ("faults/lost_workers", "faults/seconds_down")
"""Metrics of a step in which some workers were missing."""
LEARNERS = CIRCLE[STATIONS.index("learning")]
ADVICE = {facts.worker: facts.advice for facts in FACTS.values()}
"""How to make a role faster."""


class Diagnosis(NamedTuple):
    """Why a run is not faster, in two sentences."""

    limit: str
    """Which role is the bottleneck."""
    advice: str
    """What to change first."""


def diagnosis(steps: Sequence[Mapping[str, Any]], max_staleness: int) -> Diagnosis:
    """Diagnose some steps by their metrics (`share/...`, `time/...`). Steps in which workers were missing are ignored,
    unless workers were missing in all of them: no setting changes the wait for a lost worker."""
    steps = [row for row in steps if not any(row.get(name) for name in DISTURBED)] or steps
    shares = mean_shares(steps)
    role = bottleneck(shares)
    seconds = sum(row.get("time/step") or 0.0 for row in steps)
    publishing = sum(row.get("weights/publish_seconds") or 0.0 for row in steps) / seconds if seconds else 0.0
    busy = shares[role].get(BUSY, 0.0) if role else 0.0
    limit = f"bottleneck: {role}, busy for {busy:.0%} of the time" if role else "bottleneck: not known yet"
    return Diagnosis(limit, f"what to change: {recommend(shares, max_staleness, publishing)}")


def recommend(shares: Shares, max_staleness: int, publish_share: float = 0.0) -> str:
    """A sentence about what to change first, or that nothing stands out.

    Args:
        shares: of each role's time, as returned by `waiting_shares`.
        max_staleness: the run's η.
        publish_share: of the wall time, spent on publishing weights.
    """
    limit = bottleneck(shares)
    if limit is None:
        return "nothing was measured yet"
    if publish_share > NOTICEABLE:
        return (f"publishing weights takes {publish_share:.0%} of the time: more learning per version "
                "(coordinator.prompts_per_step), or adapters (policy.lora), whose untouched layers are not sent")
    overhead = min(share.get(COORDINATOR, 0.0) for share in shares.values())
    if overhead > NOTICEABLE:
        return (f"for {overhead:.0%} of the time no role works: larger chunks (generator.chunk) or larger steps "
                "(coordinator.prompts_per_step) lessen the coordinator overhead")
    learning = max((shares[r].get(BUSY, 0.0) for r in LEARNERS if r in shares), default=0.0)
    generating = shares.get("generator", {}).get(BUSY, 0.0)
    if not max_staleness and min(learning, generating) > NOTICEABLE:
        gain = (learning + generating) / max(learning, generating)
        return (f"generators and learners take turns ({generating:.0%} and {learning:.0%} of the time): "
                f"coordinator.max_staleness=1 lets them work side by side, up to {gain:.1f} times as fast where they "
                "share no cores")
    busiest = shares[limit].get(BUSY, 0.0)
    if max_staleness and min(learning, generating) < busiest - NOTICEABLE and busiest < 1 - NOTICEABLE:
        return (f"neither side is always busy (generators {generating:.0%}, learners {learning:.0%} of the time): "
                f"coordinator.max_staleness={max_staleness + 1} lets rollouts of uneven length even out, if training "
                "tolerates older samples")
    waiting = max((share.get(limit, 0.0) for role, share in shares.items() if role != limit), default=0.0)
    if waiting < NOTICEABLE:
        return "nothing stands out: the roles are in balance"
    return (f"{limit} limits the run (busy {busiest:.0%}, others wait for it up to {waiting:.0%}): "
            f"{ADVICE.get(limit, '')}{_to_spare(limit, learning, generating)}")


def _to_spare(limit: str, learning: float, generating: float) -> str:
    """Which other workers could be fewer: those of the other side, when they are idle for more than half of the
    time."""
    side, busy, field = (("generators", generating, "generator.workers") if limit in LEARNERS else
                         ("learners", learning, "policy.workers, critic.workers"))
    if limit not in (*LEARNERS, "generator") or busy > 0.5:
        return ""
    return f"; {side} are idle for {1 - busy:.0%} of the time, so fewer of them ({field}) would do"
