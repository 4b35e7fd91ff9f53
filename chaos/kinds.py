"""The kinds of fault: whom each strikes, in which state, how, and what a run is expected to do about it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from rlhf_ray.failpoints import POINTS

Target = Literal["worker", "node", "learner", "numbers", "service", "driver", "failpoint", "disk", "network",
                 "checkpoint"]
KILL, STOP, TERM = int(signal.SIGKILL), int(signal.SIGSTOP), int(signal.SIGTERM)
TOO_LARGE, REFUSED = "http_largest", "http_400"
SERVED = {
    "500": "answers 500", "429": "answers 429, with Retry-After", "slow": "takes longer than a request may",
    "truncated": "ends in the middle of an answer", "reset": "resets the connection", "nan": "scores NaN",
    "too_few": "gives too few scores",
    "largest": "gives scores so large that a loss is not finite",
    "400": "refuses a prompt from now on: its samples leave the run by name",
}
"""How the reward service may fail, by the names of its behaviours."""


@dataclass(frozen=True)
class Kind:
    """One way of doing harm."""

    name: str
    target: Target
    words: str
    """What is done, for people."""
    role: str = ""
    """Of the worker that is struck."""
    phase: str = ""
    """What it must be at work on; of numbers, which."""
    signal: int = 0
    """What it is sent."""

    @property
    def ends_the_driver(self) -> bool:
        """Whether the run must be started again afterwards."""
        return self.target in ("driver", "failpoint", "disk")

    @property
    def follows_an_end(self) -> bool:
        """Whether it is done while no driver is there, or to one that is about to start."""
        return self.target in ("checkpoint", "network")

    @property
    def changes_results(self) -> bool:
        """Whether a run that gets over it ends with other weights: a score that is a number is believed, a step whose
        gradient is none is left out, and so is a prompt that has no score."""
        return self.name in (TOO_LARGE, REFUSED) or self.target == "numbers"

    @property
    def stops(self) -> bool:
        """Whether the victim is stopped, and lives on."""
        return self.signal == STOP

    @property
    def comes_back(self) -> bool:
        """Whether what was stopped goes on later, when the run has given it up."""
        return self.target == "node" and self.stops


KINDS = {kind.name: kind for kind in (
    Kind("generator_kill", "worker", "a generator with requests in flight is killed", "generator", "generate", KILL),
    Kind("generator_stop", "worker", "a generator with requests in flight is stopped", "generator", "generate", STOP),
    Kind("generator_kill_in_publication", "worker", "a generator that takes new weights is killed", "generator",
         "publish", KILL),
    Kind("reward_kill", "worker", "a reward scorer that scores is killed", "reward_scorer", "reward", KILL),
    Kind("reward_stop", "worker", "a reward scorer that scores is stopped", "reward_scorer", "reward", STOP),
    Kind("reference_kill", "worker", "a reference scorer at work is killed", "reference_scorer", "reference", KILL),
    Kind("reference_stop", "worker", "a reference scorer at work is stopped", "reference_scorer", "reference", STOP),
    Kind("assembler_kill", "worker", "an assembler at work is killed", "assembler", "assemble", KILL),
    Kind("policy_kill", "learner", "a policy's rank is killed in an update", "policy_learner", "policy_update", KILL),
    Kind("policy_stop", "learner", "a policy's rank is stopped in an update", "policy_learner", "policy_update", STOP),
    Kind("policy_kill_in_forward", "learner", "a policy's rank is killed while it reads rollouts", "policy_learner",
         "logprobs", KILL),
    Kind("critic_kill", "learner", "a critic's rank is killed in an update", "critic_learner", "critic_update", KILL),
    Kind("critic_stop", "learner", "a critic's rank is stopped in an update", "critic_learner", "critic_update", STOP),
    Kind("node_lost", "node", "a node with a generator at work is lost", "generator", "generate"),
    Kind("partition", "node", "a node with a generator at work is cut off, and comes back when it was given up",
         "generator", "generate", STOP),
    Kind("loss_nan", "numbers", "a loss of one rank of the policy is NaN", "policy_learner", "loss"),
    Kind("gradient_nan", "numbers", "a gradient of one rank of the critic is NaN", "critic_learner", "gradient"),
    *(Kind(f"http_{name}", "service", f"the reward service {words}") for name, words in SERVED.items()),
    Kind("driver_kill", "driver", "the driver is killed at a random moment; --resume", signal=KILL),
    Kind("driver_term", "driver", "the driver is asked to stop by SIGTERM; --resume", signal=TERM),
    *(Kind(f"exit_at_{name}", "failpoint", f"the driver ends where {words}; --resume") for name, words
      in POINTS.items()),
    Kind("disk_full", "disk", "the disk is filled, and freed when the driver has ended; --resume"),
    Kind("request_lost", "network", "a call of the driver to a worker is lost on its way"),
    Kind("reply_lost", "network", "a worker's answer to the driver is lost on its way"),
    Kind("checkpoint_flip", "checkpoint", "a bit of the newest checkpoint is flipped before --resume"),
    Kind("checkpoint_truncate", "checkpoint", "a file of the newest checkpoint is cut short before --resume"),
    Kind("checkpoint_delete", "checkpoint", "a file of the newest checkpoint is deleted before --resume"),
)}
"""By name, in the order of the table."""


def of_target(*targets: Target) -> list[Kind]:
    """The kinds with one of these targets."""
    return [kind for kind in KINDS.values() if kind.target in targets]
