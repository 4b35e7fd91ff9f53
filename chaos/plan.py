"""Which faults a run meets, and when: drawn from a seed.

A plan is a list. What stands up to a fault of the driver, and it itself, happens in one driver process. Damage to a
checkpoint and the loss of a message follow such a fault, and meet the next process.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from chaos.kinds import KINDS, Kind

MOST_DELAY_S = {"generate": 0.1, "policy_update": 0.2, "critic_update": 0.2}
"""Longest delay within a call, by phase; others are over too soon for any."""
DRIVER_DELAY_S = 1.0
MOST_SIGHTINGS = {"policy_update": 1, "critic_update": 1, "logprobs": 2}
"""By phase, for those that come once or twice a step."""
OTHERWISE = 4


@dataclass(frozen=True)
class Fault:
    """One fault that is to be injected."""

    number: int
    """Unique in its run, from 1."""
    kind: str
    step: int
    """Not before so many updates are made."""
    rank: int = 0
    sightings: int = 1
    """Of calls in the state that the kind asks for, the how manieth is struck."""
    delay_s: float = 0.0
    """From the moment that call is seen; the victim must be in the same call still."""
    place: float = 0.0
    """Of damage: where among files and bytes, as a share."""
    whole_checkpoints: int = 0
    """Not before there are so many: damage follows, and there must be another to go on from."""

    @property
    def what(self) -> Kind:
        """Its kind."""
        return KINDS[self.kind]

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def of(cls, told: dict[str, Any]) -> Self:
        """From `plain`."""
        return cls(**told)


def plan(seed: int, kinds: Sequence[str], steps: int, ranks: Mapping[str, int], saved_every: int) -> list[Fault]:
    """A fault of each of `kinds` (which may repeat), in random order at random moments.

    Args:
        steps: of the run; the last faults come early enough to be over at its end. See `fewest_steps`.
        ranks: workers by role, where there are several.
        saved_every: steps between checkpoints. Before one that is damaged there must be another.
    """
    draw = random.Random(seed)
    after = [kind for kind in kinds if KINDS[kind].follows_an_end]
    ends = [kind for kind in kinds if KINDS[kind].ends_the_driver]
    others = [kind for kind in kinds if kind not in after and kind not in ends]
    ends += ["driver_kill"] * (len(after) - len(ends))
    for some in (after, ends, others):
        draw.shuffle(some)
    room, before = max(1, steps - saved_every - 1), ends[: len(after)]
    order = _mixed(draw, others, ends[len(after) :])
    due: list[tuple[int, tuple[str, ...]]] = [
        (1 + place * room // len(order), (kind,)) for place, kind in enumerate(order)]
    moments = _apart(draw, len(after), room, saved_every)
    due += [(step, pair) for step, pair in zip(moments, zip(before, after, strict=True), strict=True)]
    faults: list[Fault] = []
    for step, together in sorted(due, key=lambda one: one[0]):
        whole = 2 if KINDS[together[-1]].target == "checkpoint" else 0
        for kind in together:
            faults.append(_drawn(draw, len(faults) + 1, kind, step, ranks, whole))
    return faults


def fewest_steps(kinds: Sequence[str], saved_every: int) -> int:
    """How many steps a run must have for all that is to follow an end of its driver."""
    after = sum(KINDS[kind].follows_an_end for kind in kinds)
    return 2 * saved_every * (after + 1) + saved_every + 2 if after else 0


def _apart(draw: random.Random, number: int, room: int, saved_every: int) -> list[int]:
    """Steps for so many faults that follow an end. Damage takes the newest checkpoint, and the run goes back to the one
    before: until the next there must be new ones. A message must have time to get lost."""
    first, least = 2 * saved_every + 1, 2 * saved_every
    stretch = max(least, (room - first) // max(1, number))
    return [first + place * stretch + draw.randint(0, stretch - least) for place in range(number)]


def _mixed(draw: random.Random, others: Sequence[str], ends: Sequence[str]) -> list[str]:
    """Ends at random places among the others."""
    places = set(draw.sample(range(len(others) + len(ends)), len(ends)))
    rest, stops = iter(others), iter(ends)
    return [next(stops) if place in places else next(rest) for place in range(len(others) + len(ends))]


def _drawn(draw: random.Random, number: int, kind: str, step: int, ranks: Mapping[str, int], whole: int) -> Fault:
    what = KINDS[kind]
    longest = DRIVER_DELAY_S if what.target == "driver" else MOST_DELAY_S.get(what.phase, 0.0)
    return Fault(number, kind, step, draw.randrange(ranks.get(what.role, 1)),
                 draw.randint(1, MOST_SIGHTINGS.get(what.phase, OTHERWISE)), round(draw.uniform(0, longest), 3),
                 place=draw.random() if what.target == "checkpoint" else 0.0, whole_checkpoints=whole)
