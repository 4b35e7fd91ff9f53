"""Learners that make a loss or a gradient NaN when they are told to. Otherwise they are the real ones, bit for bit.

An order is a file beside the strikes, which the driver writes and the rank that it names takes away when it obeys.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chaos.strikes import STRIKES, Strikes
from rlhf_ray.engine.train_engine import StepResult
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.learner import Learner
from rlhf_ray.roles.micro_batch import Meter
from rlhf_ray.roles.policy_learner import PolicyLearner


def poison_file(strikes: Strikes) -> Path:
    """Where the driver leaves an order."""
    return strikes.path.with_suffix(".poison")


def order_poison(strikes: Strikes, number: int, role: str, rank: int, what: str) -> None:
    """Have a rank's next loss be NaN, or its gradient. `number` is the fault's."""
    unfinished = poison_file(strikes).with_suffix(".unfinished")
    unfinished.write_text(f"{number} {role} {rank} {what}")
    unfinished.replace(poison_file(strikes))


class Poisonable(Learner):
    """A learner that obeys."""

    role = ""
    _step = 0
    """Of the update under way, counted from 0."""
    _ill: int | None = None
    """Number of the fault after which no step was applied yet."""

    def update(self, step: int, *rest: Any) -> Any:
        """As the real one."""
        self._step = step
        return super().update(step, *rest)  # type: ignore[misc]

    def share(self, part: Any, whole: Any, counted: bool, meter: Meter) -> Tensor:
        """As the real one, but for the loss that the order is about."""
        loss = super().share(part, whole, counted, meter)
        strikes = Strikes(Path(os.environ[STRIKES]))
        number, what = self._order(strikes)
        if number is None:
            return loss
        self._ill = number
        strikes.add("confirmed", fault=number, state=f"{what} of {self.role}/{self.rank} was NaN", seconds=0.0,
                    step=self._step + 1)
        if what == "loss":
            return loss * torch.nan
        loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss

    def optimize(self, mini_batch: Any, meter: Meter) -> StepResult:
        """As the real one; notes when a step is applied again."""
        result = super().optimize(mini_batch, meter)
        if result.applied and self._ill is not None:
            Strikes(Path(os.environ[STRIKES])).add("recovered", fault=self._ill)
            self._ill = None
        return result

    def _order(self, strikes: Strikes) -> tuple[int | None, str]:
        """The number and kind of an order for this rank, which is taken away."""
        file = poison_file(strikes)
        if not file.exists():
            return None, ""
        number, role, rank, what = file.read_text().split()
        if (role, int(rank)) != (self.role, self.rank):
            return None, ""
        file.unlink()
        return int(number), what


class PoisonablePolicyLearner(Poisonable, PolicyLearner):
    """One rank of the policy."""

    role = "policy_learner"


class PoisonableCriticLearner(Poisonable, CriticLearner):
    """One rank of the critic."""

    role = "critic_learner"


def install() -> None:
    """Let the runs of this process have these learners."""
    from rlhf_ray.stages import ppo_roles

    ppo_roles.PolicyLearner, ppo_roles.CriticLearner = (  # type: ignore[misc]
        PoisonablePolicyLearner, PoisonableCriticLearner)
