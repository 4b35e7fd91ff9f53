"""Learners that make a loss or a gradient NaN on order. Otherwise they equal the real ones, bit for bit.

An order is a file beside the injection log. The driver writes it; the rank that it names deletes it when it obeys.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chaos.injection_log import INJECTION_LOG, InjectionLog
from rlhf_ray.records import Batch
from rlhf_ray.roles.micro_batch import AverageMeter, PartLoss
from rlhf_ray.roles.ppo_update import ChosenRows, PPOLearner, Update


def nan_order_file(injections: InjectionLog) -> Path:
    """The file of an order."""
    return injections.path.with_suffix(".nan_order")


def order_nan(injections: InjectionLog, number: int, role: str, rank: int, what: str) -> None:
    """Order a rank to make its next loss or gradient NaN.

    Args:
        number: of the fault.
        what: "loss" or "gradient".
    """
    unfinished = nan_order_file(injections).with_suffix(".unfinished")
    unfinished.write_text(f"{number} {role} {rank} {what}")
    unfinished.replace(nan_order_file(injections))


def unrecovered(injections: InjectionLog, role: str, rank: int) -> int | None:
    """Number of a rank's last fault, if its process ended before it applied an optimizer step again."""
    over = {line["fault"] for line in injections.read("recovered")}
    mine = [line["fault"] for line in injections.read("confirmed") if line.get("rank_of") == [role, rank]]
    return mine[-1] if mine and mine[-1] not in over else None


class NaNInjection(PPOLearner):
    """Mixin of a learner that obeys such orders."""

    role: str
    _step = 0
    """Of the update under way, counted from 0."""
    _unrecovered: int | None = None
    """Number of the last fault, until an optimizer step is applied after it; perhaps by a later process."""
    _began = False
    """Whether this process has made an optimizer step."""

    def update(self, step: int, *rest: Any) -> Any:
        """As the real learner; remembers the step."""
        self._step = step
        return super().update(step, *rest)  # type: ignore[misc]

    def loss(self, part: Any, *rest: Any) -> PartLoss:
        """As the real learner; when there is an order for this rank, the loss or its gradient is NaN."""
        found: PartLoss = super().loss(part, *rest)  # type: ignore[misc]
        injections = InjectionLog(Path(os.environ[INJECTION_LOG]))
        number, what = self._take_order(injections)
        if number is None:
            return found
        self._unrecovered = number
        injections.add("confirmed", fault=number, state=f"{what} of {self.role}/{self.rank} was NaN", seconds=0.0,
                       step=self._step + 1, rank_of=[self.role, self.rank])
        if what == "loss":
            return replace(found, loss=found.loss * torch.nan)
        found.loss.register_hook(lambda gradient: gradient * torch.nan)
        return found

    def optimize(self, mini_batch: Batch, chosen: ChosenRows, update: Update, meter: AverageMeter) -> Any:
        """As the real learner; logs "recovered" when a step is applied again."""
        injections = InjectionLog(Path(os.environ[INJECTION_LOG]))
        if not self._began:
            self._began = True
            self._unrecovered = self._unrecovered or unrecovered(injections, self.role, self.rank)
        result = super().optimize(mini_batch, chosen, update, meter)
        if result is not None and result.applied and self._unrecovered is not None:
            injections.add("recovered", fault=self._unrecovered)
            self._unrecovered = None
        return result

    def _take_order(self, injections: InjectionLog) -> tuple[int | None, str]:
        """The fault number and kind of an order for this rank, which is deleted."""
        file = nan_order_file(injections)
        if not file.exists():
            return None, ""
        number, role, rank, what = file.read_text().split()
        if (role, int(rank)) != (self.role, self.rank):
            return None, ""
        file.unlink()
        return int(number), what
