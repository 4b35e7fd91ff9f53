"""The sending side of publications: gathers the learner's tensors bucket by bucket and seals each bucket.

Only one bucket's tensors exist whole at a time, so a model sharded over many ranks never has to fit on one of them.
Tensors that training does not change (frozen layers; with adapters every layer without one) are sent once, in a whole
publication. Later publications may leave them out and list the digests that the receiver must already have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_ray.errors import TrainingError, WeightsError
from rlhf_ray.records import PublicationSize, TensorEntry, WeightBucket, WeightOffer, WeightsPlan
from rlhf_ray.weights.fingerprint import fingerprint
from rlhf_ray.weights.host_buffers import HostBuffers, Wait, bytes_needed
from rlhf_ray.weights.manifest import TensorSpec, as_announced, checksum, pack, plan_buckets, seal

GatherTensors = Callable[[list[str]], Mapping[str, torch.Tensor] | None]
"""Whole tensors by name. On sharded models it is a collective call: every rank makes it, and ranks that do not send may
return None."""


class SealedBuckets:
    """One model's weights as sealed buckets.

    Example::

        buckets = SealedBuckets([("a", (3, 4), "bfloat16")], ["a"], bucket_bytes=1000, gather=lambda names: tensors)
        first = buckets.bucket(version=1, index=0)

    Args:
        tensors: all tensors of the model, in the order in which they are sent.
        changing: names of the tensors that training changes.
        bucket_bytes: size of the largest bucket; see `manifest.plan_buckets`.
        gather: see `GatherTensors`.

    Raises:
        WeightsError: as `manifest.plan_buckets`.
    """

    def __init__(
        self, tensors: Sequence[TensorSpec], changing: Collection[str], bucket_bytes: int, gather: GatherTensors
    ) -> None:
        self._whole = plan_buckets(tensors, bucket_bytes)
        self._changing = plan_buckets([spec for spec in tensors if spec[0] in changing], bucket_bytes)
        self._unchanged = {name for name, *_ in tensors} - set(changing)
        self._gather = gather
        self._digests: dict[str, str] = {}
        self._buffers: HostBuffers | None = None

    @property
    def plan(self) -> WeightsPlan:
        """Size of each kind of publication."""
        return WeightsPlan(_size(self._whole), _size(self._changing))

    def bucket(self, version: int, index: int, whole: bool = True) -> WeightBucket | None:
        """Gather and seal bucket `index` of a publication; None if `gather` returns None.

        The arrays are views of tensors on CPUs. Those of a GPU are hashed as they arrive in main memory, one while the
        next is copied, and stay there until the second bucket after this one.

        Args:
            whole: include the tensors that training does not change.

        Raises:
            WeightsError: there is no such bucket, or the gathered tensors do not match the plan.
            TrainingError: a tensor contains NaN or infinity.
        """
        plan, entries = self._planned(version, index, whole)
        tensors = self._gather([entry.name for entry in entries])
        if tensors is None:
            return None
        ready = as_announced(entries, tensors)
        require_finite(version, ready.items())
        arrays, waits = self._in_main_memory(entries, ready)
        bucket = seal(version, index, len(plan), entries, arrays, waits)
        self._record_digests(entries, bucket.digests)
        return bucket

    def offer(
        self, version: int, index: int, whole: bool, gather: GatherTensors
    ) -> tuple[WeightOffer, dict[str, Tensor]]:
        """Describe a bucket whose tensors stay on their device; returns it with the tensors in the announced dtypes.

        Args:
            gather: returns the tensors on that device.

        Raises:
            WeightsError, TrainingError: as `bucket`.
        """
        plan, entries = self._planned(version, index, whole)
        ready = as_announced(entries, gather([entry.name for entry in entries]) or {})
        require_finite(version, ready.items())
        digests = [fingerprint(entry, ready[entry.name]) for entry in entries]
        self._record_digests(entries, digests)
        return WeightOffer(version, index, len(plan), entries, digests,
                           checksum(entries, digests, version, index, len(plan))), ready

    def _planned(self, version: int, index: int, whole: bool) -> tuple[list[list[TensorEntry]], list[TensorEntry]]:
        plan = self._whole if whole else self._changing
        if not 0 <= index < len(plan):
            raise WeightsError(f"weights version {version} has buckets 0 to {len(plan) - 1}, not {index}; "
                               "plan the weights again")
        return plan, plan[index]

    def _in_main_memory(
        self, entries: Sequence[TensorEntry], tensors: Mapping[str, Tensor]
    ) -> tuple[list[NDArray[np.uint8]], list[Wait] | None]:
        """One bucket's bytes, and what waits for each of them if they are copied."""
        if not any(tensor.is_cuda for tensor in tensors.values()):
            return pack(entries, tensors), None
        if self._buffers is None:
            self._buffers = HostBuffers(max(map(bytes_needed, [*self._whole, *self._changing])), pinned=True)
        return self._buffers.copy(entries, tensors)

    def _record_digests(self, entries: Sequence[TensorEntry], digests: Sequence[str]) -> None:
        self._digests |= {entry.name: digest for entry, digest in zip(entries, digests, strict=True)
                          if entry.name in self._unchanged}

    def unchanged(self) -> dict[str, str]:
        """Digests of the unchanged tensors as the last whole publication sent them; partial ones leave these out.

        Raises:
            WeightsError: there was no whole publication.
        """
        if self._digests.keys() != self._unchanged:
            raise WeightsError(f"{len(self._unchanged - self._digests.keys())} tensors were never published; "
                               "publish the weights whole first")
        return self._digests


def require_finite(version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Check that no tensor contains NaN or infinity: generators would sample from it without an error.

    Raises:
        TrainingError: one does.
    """
    named = list(tensors)
    if not named:
        return
    # A sum is the fastest pass, and not finite if an element is not; all sums are read once by the host.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for _, tensor in named]).isfinite().tolist()
    for (name, tensor), has_finite_sum in zip(named, sums, strict=True):
        if not has_finite_sum and not tensor.isfinite().all():
            raise TrainingError(f"weights version {version} are not published: tensor {name!r} is not finite. Lower "
                                "the learning rate or check the rewards of the last steps, and use --resume to "
                                "continue from the last checkpoint")


def _size(plan: list[list[TensorEntry]]) -> PublicationSize:
    return PublicationSize(len(plan), sum(entry.nbytes for bucket in plan for entry in bucket))
