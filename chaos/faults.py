"""The kinds of fault, and the plan of a run: which faults it gets, and when, drawn from a seed.

A plan is a list. Each driver process gets the faults up to and including the next one that ends the driver. Damage to
a checkpoint and the loss of a message follow such a fault, and affect the next process.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from rlhf_ray.failpoints import POINTS

Target = Literal["worker", "node", "learner", "numbers", "service", "driver", "failpoint", "disk", "network",
                 "checkpoint"]
KILL, STOP, TERM = int(signal.SIGKILL), int(signal.SIGSTOP), int(signal.SIGTERM)
TOO_LARGE, REFUSED = "http_largest", "http_400"
SERVED = {
    "500": "answers 500", "429": "answers 429, with Retry-After", "slow": "takes longer than a request may",
    "truncated": "ends in the middle of a response", "reset": "resets the connection", "nan": "scores NaN",
    "too_few": "gives too few scores",
    "largest": "gives scores so large that a loss is not finite",
    "400": "refuses a prompt from now on: its samples leave the run by name",
}
"""How the reward service may fail, by the name of the behaviour."""
MOST_DELAY_S = {"generate": 0.1, "policy_update": 0.2, "critic_update": 0.2}
"""Longest delay within a call, by phase; calls of other phases are too short for a delay."""
DRIVER_DELAY_S = 1.0
MOST_SIGHTINGS = {"policy_update": 1, "critic_update": 1, "logprobs": 2}
"""By phase, for calls that are made once or twice a step."""
DEFAULT_MOST_SIGHTINGS = 4


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    name: str
    target: Target
    words: str
    """Description for tables."""
    role: str = ""
    """The victim's role, for faults of workers."""
    phase: str = ""
    """The call that must be under way; for the target "numbers": loss or gradient."""
    signal: int = 0
    """The signal that the victim is sent."""

    @property
    def ends_the_driver(self) -> bool:
        """Whether the run must be resumed afterwards."""
        return self.target in ("driver", "failpoint", "disk")

    @property
    def follows_an_end(self) -> bool:
        """Whether it is injected while no driver runs, or into a driver that is about to start."""
        return self.target in ("checkpoint", "network")

    @property
    def changes_results(self) -> bool:
        """Whether a run that survives it ends with other weights: a finite score is accepted, an optimizer step whose
        gradient is not finite is skipped, and a prompt without a score is quarantined."""
        return self.name in (TOO_LARGE, REFUSED) or self.target == "numbers"

    @property
    def stops(self) -> bool:
        """Whether the victim is stopped, not killed."""
        return self.signal == STOP

    @property
    def comes_back(self) -> bool:
        """Whether the stopped processes continue after the run has replaced them."""
        return self.target == "node" and self.stops


KINDS = {kind.name: kind for kind in (
    Kind("generator_kill", "worker", "a generator with requests in flight is killed", "generator", "generate", KILL),
    Kind("generator_stop", "worker", "a generator with requests in flight is stopped", "generator", "generate", STOP),
    Kind("generator_kill_in_publication", "worker", "a generator that receives new weights is killed", "generator",
         "publish", KILL),
    Kind("reward_kill", "worker", "a reward scorer at work is killed", "reward_scorer", "reward", KILL),
    Kind("reward_stop", "worker", "a reward scorer at work is stopped", "reward_scorer", "reward", STOP),
    Kind("reference_kill", "worker", "a reference scorer at work is killed", "reference_scorer", "reference", KILL),
    Kind("reference_stop", "worker", "a reference scorer at work is stopped", "reference_scorer", "reference", STOP),
    Kind("assembler_kill", "worker", "an assembler at work is killed", "assembler", "assemble", KILL),
    Kind("policy_kill", "learner", "a policy's rank is killed in an update", "policy_learner", "policy_update", KILL),
    Kind("policy_stop", "learner", "a policy's rank is stopped in an update", "policy_learner", "policy_update", STOP),
    Kind("policy_kill_in_forward", "learner", "a policy's rank is killed while it computes log-probabilities",
         "policy_learner", "logprobs", KILL),
    Kind("critic_kill", "learner", "a critic's rank is killed in an update", "critic_learner", "critic_update", KILL),
    Kind("critic_stop", "learner", "a critic's rank is stopped in an update", "critic_learner", "critic_update", STOP),
    Kind("node_lost", "node", "a node with a generator at work is lost", "generator", "generate"),
    Kind("partition", "node", "a node with a generator at work is cut off, and comes back after it was replaced",
         "generator", "generate", STOP),
    Kind("loss_nan", "numbers", "a loss of one rank of the policy is NaN", "policy_learner", "loss"),
    Kind("gradient_nan", "numbers", "a gradient of one rank of the critic is NaN", "critic_learner", "gradient"),
    *(Kind(f"http_{name}", "service", f"the reward service {words}") for name, words in SERVED.items()),
    Kind("driver_kill", "driver", "the driver is killed at a random moment; --resume", signal=KILL),
    Kind("driver_term", "driver", "the driver gets SIGTERM; --resume", signal=TERM),
    *(Kind(f"exit_at_{name}", "failpoint", f"the driver ends where {words}; --resume") for name, words
      in POINTS.items()),
    Kind("disk_full", "disk", "the disk is filled, and freed when the driver has ended; --resume"),
    Kind("request_lost", "network", "a call of the driver to a worker is lost on its way"),
    Kind("reply_lost", "network", "a worker's answer to the driver is lost on its way"),
    Kind("checkpoint_flip", "checkpoint", "a bit of the newest checkpoint is flipped before --resume"),
    Kind("checkpoint_truncate", "checkpoint", "a file of the newest checkpoint is cut short before --resume"),
    Kind("checkpoint_delete", "checkpoint", "a file of the newest checkpoint is deleted before --resume"),
)}
"""All kinds by name, in the order of the table."""


def of_target(*targets: Target) -> list[Kind]:
    """The kinds with one of these targets."""
    return [kind for kind in KINDS.values() if kind.target in targets]


@dataclass(frozen=True)
class Fault:
    """One fault to inject."""

    number: int
    """Unique in its run, from 1."""
    kind: str
    step: int
    """The fault is due after this many updates."""
    rank: int = 0
    sightings: int = 1
    """The fault is injected into the n-th call in the state that the kind requires."""
    delay_s: float = 0.0
    """Seconds from the moment that call is seen; the victim must still be in the same call."""
    position: float = 0.0
    """For damage: which file and which byte, as a fraction."""
    valid_checkpoints: int = 0
    """Number of valid checkpoints required first: damage follows, and another one must be left to resume from."""

    @property
    def details(self) -> Kind:
        """Its kind."""
        return KINDS[self.kind]

    def as_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        return cls(**data)


def plan(seed: int, kinds: Sequence[str], steps: int, ranks: Mapping[str, int], saved_every: int) -> list[Fault]:
    """A fault of each of `kinds` (which may repeat), in random order at random moments.

    Args:
        steps: number of updates; the last faults are due early enough to be over at the end. See `fewest_steps`.
        ranks: number of workers of each role that has several.
        saved_every: steps between checkpoints. Before a damaged checkpoint there must be another one.
    """
    draw = random.Random(seed)
    after = [kind for kind in kinds if KINDS[kind].follows_an_end]
    ends = [kind for kind in kinds if KINDS[kind].ends_the_driver]
    others = [kind for kind in kinds if kind not in after and kind not in ends]
    ends += ["driver_kill"] * (len(after) - len(ends))
    for group in (after, ends, others):
        draw.shuffle(group)
    span, before = max(1, steps - saved_every - 1), ends[: len(after)]
    order = _mixed(draw, others, ends[len(after) :])
    due: list[tuple[int, tuple[str, ...]]] = [
        (1 + index * span // len(order), (kind,)) for index, kind in enumerate(order)]
    moments = _spread(draw, len(after), span, saved_every)
    due += [(step, pair) for step, pair in zip(moments, zip(before, after, strict=True), strict=True)]
    faults: list[Fault] = []
    for step, together in sorted(due, key=lambda one: one[0]):
        valid = 2 if KINDS[together[-1]].target == "checkpoint" else 0
        for kind in together:
            faults.append(_drawn(draw, len(faults) + 1, kind, step, ranks, valid))
    return faults


def fewest_steps(kinds: Sequence[str], saved_every: int) -> int:
    """How many steps a run needs for all its faults that follow an end of the driver."""
    after = sum(KINDS[kind].follows_an_end for kind in kinds)
    return 2 * saved_every * (after + 1) + saved_every + 2 if after else 0


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
    longest = DRIVER_DELAY_S if details.target == "driver" else MOST_DELAY_S.get(details.phase, 0.0)
    return Fault(number, kind, step, draw.randrange(ranks.get(details.role, 1)),
                 draw.randint(1, MOST_SIGHTINGS.get(details.phase, DEFAULT_MOST_SIGHTINGS)),
                 round(draw.uniform(0, longest), 3),
                 position=draw.random() if details.target == "checkpoint" else 0.0, valid_checkpoints=valid)
