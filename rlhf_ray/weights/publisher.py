"""The sending side of publications: asks the learner for tensors bucket by bucket and seals each bucket.

Only one bucket's tensors exist in full at a time, so a model sharded over many ranks never has to fit on one of them.
Tensors that training leaves as they are (frozen layers; with adapters all that no adapter touches) go out once, in a
whole publication. Publications after it may leave them out, and say by digest what the receiver must already have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from rlhf_ray.errors import WeightsError
from rlhf_ray.records import PublicationSize, TensorEntry, WeightBucket, WeightOffer, WeightsPlan
from rlhf_ray.weights.fingerprint import fingerprint
from rlhf_ray.weights.manifest import TensorSpec, as_announced, checksum, pack, plan_buckets, seal

Gather = Callable[[list[str]], Mapping[str, torch.Tensor] | None]
"""Full tensors by name. On sharded models it is a collective: every rank calls it, and ranks that do not send may
return None."""


class Publisher:
    """One model's weights as rows of sealed buckets.

    Args:
        tensors: all tensors of the model, in the order in which they are sent.
        changing: names of those that training changes.
        bucket_bytes: largest bucket; see `manifest.plan_buckets`.
        gather: see `Gather`.

    Raises:
        WeightsError: as `manifest.plan_buckets`.
    """

    def __init__(
        self, tensors: Sequence[TensorSpec], changing: Collection[str], bucket_bytes: int, gather: Gather
    ) -> None:
        self._whole = plan_buckets(tensors, bucket_bytes)
        self._changing = plan_buckets([spec for spec in tensors if spec[0] in changing], bucket_bytes)
        self._unchanged = {name for name, *_ in tensors} - set(changing)
        self._gather = gather
        self._digests: dict[str, str] = {}

    @property
    def plan(self) -> WeightsPlan:
        """How much each kind of publication sends."""
        return WeightsPlan(_size(self._whole), _size(self._changing))

    def bucket(self, version: int, index: int, whole: bool = True) -> WeightBucket | None:
        """Gather and seal bucket `index` of a publication; None where `gather` returned None.

        Args:
            whole: with the tensors that training leaves as they are.

        Raises:
            WeightsError: no such bucket, or the gathered tensors do not fit the plan.
        """
        plan, entries = self._planned(version, index, whole)
        tensors = self._gather([entry.name for entry in entries])
        if tensors is None:
            return None
        bucket = seal(version, index, len(plan), entries, pack(entries, tensors))
        self._note(entries, bucket.digests)
        return bucket

    def offer(self, version: int, index: int, whole: bool, gather: Gather) -> tuple[WeightOffer, dict[str, Tensor]]:
        """Describe a bucket whose tensors stay on their device, and give them, in the dtypes that are announced.

        Args:
            gather: gives the tensors on that device, here and now.

        Raises:
            WeightsError: as `bucket`.
        """
        plan, entries = self._planned(version, index, whole)
        ready = as_announced(entries, gather([entry.name for entry in entries]) or {})
        digests = [fingerprint(entry, ready[entry.name]) for entry in entries]
        self._note(entries, digests)
        return WeightOffer(version, index, len(plan), entries, digests,
                           checksum(entries, digests, version, index, len(plan))), ready

    def _planned(self, version: int, index: int, whole: bool) -> tuple[list[list[TensorEntry]], list[TensorEntry]]:
        plan = self._whole if whole else self._changing
        if not 0 <= index < len(plan):
            raise WeightsError(f"weights version {version} has buckets 0 to {len(plan) - 1}, asked for {index}")
        return plan, plan[index]

    def _note(self, entries: Sequence[TensorEntry], digests: Sequence[str]) -> None:
        self._digests |= {entry.name: digest for entry, digest in zip(entries, digests, strict=True)
                          if entry.name in self._unchanged}

    def unchanged(self) -> dict[str, str]:
        """Digests of the tensors that publications of what changes leave out, as the last whole one sent them.

        Raises:
            WeightsError: there was no whole one.
        """
        if self._digests.keys() != self._unchanged:
            raise WeightsError(f"{len(self._unchanged - self._digests.keys())} tensors were never published; "
                               "publish the weights whole first")
        return self._digests


def _size(plan: list[list[TensorEntry]]) -> PublicationSize:
    return PublicationSize(len(plan), sum(entry.nbytes for bucket in plan for entry in bucket))
