"""The plan of a run: which faults it gets, and when, drawn from a seed.

A plan is a list. Each driver process gets the faults up to and including the next one that ends the driver. Damage to
a checkpoint and the loss of a message follow such a fault, and affect the next process. Some faults are due during the
repair of the fault before them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from chaos.faults import Fault
from chaos.kinds import KINDS, kind_of

USUAL_MINUTES = 45.0
"""About the duration of one round on two cores."""
UPDATES_A_FAULT, FEWEST_STEPS = 1.5, 12
DURING_REPAIR = 0.5
"""Share of the faults that are injected while the victim of the fault before is being replaced, of those that can
be."""


def plan(seed: int, kinds: Sequence[str], steps: int, ranks: Mapping[str, int], saved_every: int) -> list[Fault]:
    """A fault of each of `kinds` (which may repeat), in random order at random moments.

    Args:
        steps: number of updates; the last faults are due early enough to be over at the end. See `steps_for`.
        ranks: number of workers of each role that has several.
        saved_every: steps between checkpoints. Before a damaged checkpoint there must be another one.
    """
    draw = random.Random(seed)
    after = [kind for kind in kinds if KINDS[kind].follows_an_end]
    last = [kind for kind in kinds if KINDS[kind].at_the_end]
    ends = [kind for kind in kinds if KINDS[kind].ends_the_driver and kind not in last]
    others = [kind for kind in kinds if kind not in after and kind not in ends and kind not in last]
    ends += ["driver_kill"] * (len(after) - len(ends))
    for group in (after, ends, others):
        draw.shuffle(group)
    span, before = max(1, steps - saved_every - 1), ends[: len(after)]
    order = _mixed(draw, others, ends[len(after) :])
    *starts, end = accumulate((_updates(kind) for kind in order), initial=0.0)
    due: list[tuple[int, tuple[str, ...]]] = [
        (1 + int(start * span / end), _with_predecessor(kind)) for start, kind in zip(starts, order, strict=True)]
    moments = _spread(draw, len(after), span, saved_every)
    due += [(step, (*_with_predecessor(end), damage))
            for step, end, damage in zip(moments, before, after, strict=True)]
    due = sorted(due, key=lambda one: one[0]) + [(steps - 1, (kind,)) for kind in last]
    faults: list[Fault] = []
    for step, together in due:
        valid = KINDS[together[-1]].checkpoints
        for kind in together:
            faults.append(_drawn(draw, len(faults) + 1, kind, step, ranks, valid))
    return _with_second_faults(draw, faults, ranks)


def _with_predecessor(kind: str) -> tuple[str, ...]:
    """The kinds of the faults that bring about the state that a kind requires, and the kind itself."""
    before = KINDS[kind].preceded_by
    return (*_with_predecessor(before), kind) if before else (kind,)


def _with_second_faults(draw: random.Random, faults: Sequence[Fault], ranks: Mapping[str, int]) -> list[Fault]:
    """Let some faults follow the one before while its victim is being replaced, at the same update. Their victim must
    be another worker, which is up."""
    planned = list(faults[:1])
    for fault in faults[1:]:
        first, role = planned[-1], kind_of(fault).role
        chosen = draw.random() < DURING_REPAIR
        possible = kind_of(first).is_repaired and not kind_of(fault).follows_an_end and not fault.valid_checkpoints
        if chosen and possible and not kind_of(fault).preceded_by:
            if role != kind_of(first).role:
                fault = replace(fault, step=first.step, during_repair=True)
            elif ranks.get(role, 1) > 1:
                fault = replace(fault, step=first.step, during_repair=True, rank=(first.rank + 1) % ranks[role])
        planned.append(fault)
    return planned


def steps_for(kinds: Sequence[str], saved_every: int) -> int:
    """How many updates a run with these faults makes."""
    after = sum(KINDS[kind].follows_an_end for kind in kinds)
    return max(FEWEST_STEPS, math.ceil(sum(map(_updates, kinds))) + saved_every + 1,
               2 * saved_every * (after + 1) + saved_every + 2 if after else 0)


def _updates(kind: str) -> float:
    """About how many updates are made between a fault and the next."""
    return UPDATES_A_FAULT + KINDS[kind].updates


def _spread(draw: random.Random, number: int, span: int, saved_every: int) -> list[int]:
    """Steps for `number` faults that follow an end of the driver. Damage invalidates the newest checkpoint, and the run
    resumes from the one before: new checkpoints must be written before the next damage. The loss of a message needs
    time, too."""
    first, least = 2 * saved_every + 1, 2 * saved_every
    interval = max(least, (span - first) // max(1, number))
    return [first + index * interval + draw.randint(0, interval - least) for index in range(number)]


def _mixed(draw: random.Random, others: Sequence[str], ends: Sequence[str]) -> list[str]:
    """The ends of the driver at random places among the other faults."""
    places = set(draw.sample(range(len(others) + len(ends)), len(ends)))
    rest, stops = iter(others), iter(ends)
    return [next(stops) if place in places else next(rest) for place in range(len(others) + len(ends))]


def _drawn(draw: random.Random, number: int, kind: str, step: int, ranks: Mapping[str, int], valid: int) -> Fault:
    details = KINDS[kind]
    return Fault(number, kind, step, draw.randrange(ranks.get(details.role, 1)),
                 draw.randint(1, details.most_sightings), round(draw.uniform(0, details.most_delay_s), 3),
                 position=draw.random(), valid_checkpoints=valid)
