"""Policy learners that publish damaged weights on order. Otherwise they equal the real ones, bit for bit.

An order is a file beside the injection log. The driver writes it; the first rank deletes it when it obeys.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from chaos.injection_log import INJECTION_LOG, InjectionLog
from rlhf_ray.records import WeightBucket
from rlhf_ray.roles.learner import Learner

NAN, FLIP = "nan", "flip"


def damage_order_file(injections: InjectionLog) -> Path:
    """The file of an order."""
    return injections.path.with_suffix(".weight_order")


def order_damage(injections: InjectionLog, number: int, damage: str) -> None:
    """Order the damage of the weights that are published next.

    Args:
        number: of the fault.
        damage: NAN: a parameter of the first rank becomes NaN. FLIP: a bit of a bucket is flipped after its digest was
            computed.
    """
    unfinished = damage_order_file(injections).with_suffix(".unfinished")
    unfinished.write_text(f"{number} {damage}")
    unfinished.replace(damage_order_file(injections))


class WeightDamage(Learner):
    """Mixin of a policy learner that obeys such orders."""

    _damaged: int | None = None
    """Number of the fault that damaged the last bucket, until the next one is gathered."""

    def weight_bucket(self, version: int, index: int, whole: bool = True) -> WeightBucket | None:  # type: ignore[override]
        """As the real learner; damaged when there is an order."""
        injections = InjectionLog(Path(os.environ[INJECTION_LOG]))
        if self._damaged is not None:
            injections.add("recovered", fault=self._damaged)
            self._damaged = None
        file = damage_order_file(injections)
        if self.rank or not file.exists():
            return self.publication.bucket(version, index, whole)
        number, damage = file.read_text().split()
        file.unlink()
        if damage == NAN:
            name = self.published_tensors().changing()[-1]
            parameter = dict(self.engine.module.model.named_parameters())[name]
            with torch.no_grad():
                parameter.view(-1)[0] = torch.nan
            state = f"{name} of version {version}"
        else:
            state = f"bucket {index} of version {version}"
        injections.add("confirmed", fault=int(number), state=state, seconds=0.0)
        bucket = self.publication.bucket(version, index, whole)
        if bucket is None or damage != FLIP:
            return bucket
        self._damaged = int(number)
        return _flipped(bucket)


def _flipped(bucket: WeightBucket) -> WeightBucket:
    first = bucket.arrays[0].copy()
    first[0] ^= 1
    return replace(bucket, arrays=[first, *bucket.arrays[1:]])
