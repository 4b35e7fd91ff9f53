"""The sending side of a publication: asks the learner for tensors bucket by bucket and seals each bucket.

Only one bucket's tensors exist in full at a time, so a model sharded over many ranks never has to fit on one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rlhf_ray.errors import WeightsError
from rlhf_ray.records import TensorEntry, WeightBucket
from rlhf_ray.weights.manifest import checksum, pack

Gather = Callable[[list[str]], Mapping[str, torch.Tensor] | None]
"""Full tensors by name. On sharded models it is a collective: every rank calls it, and ranks that do not send may
return None."""


class Publication:
    """One version of the weights as a row of sealed buckets.

    Args:
        version: the version these weights will be known by.
        plan: from `manifest.plan_buckets`.
        gather: see `Gather`.
    """

    def __init__(self, version: int, plan: Sequence[Sequence[TensorEntry]], gather: Gather) -> None:
        self.version = version
        self.count = len(plan)
        self._plan = plan
        self._gather = gather

    def bucket(self, index: int) -> WeightBucket | None:
        """Gather, lay out and seal bucket `index`; None where `gather` returned None.

        Raises:
            WeightsError: no such bucket, or the gathered tensors do not fit the plan.
        """
        if not 0 <= index < self.count:
            raise WeightsError(f"weights version {self.version} has buckets 0 to {self.count - 1}, asked for {index}")
        entries = list(self._plan[index])
        tensors = self._gather([entry.name for entry in entries])
        if tensors is None:
            return None
        data = pack(entries, tensors)
        digest = checksum(data, entries, self.version)
        return WeightBucket(self.version, index, self.count, entries, data, digest)
