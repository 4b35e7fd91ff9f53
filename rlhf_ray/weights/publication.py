"""The sending side of publications: one rank's part of gathering the learner's tensors, sealing them in buckets, and
sending these to the generators.

Only one bucket's tensors exist whole at a time, so a model sharded over many ranks never has to fit on one of them.
Tensors that training does not change (frozen layers; with adapters every layer without one) are sent once, in a whole
publication. Later publications may leave them out and list the digests that the receiver must already have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_ray.errors import NoWeightsPlan, TrainingError, WeightsError
from rlhf_ray.records import PublicationSize, TensorEntry, WeightBucket, WeightOffer, WeightRoute, WeightsPlan
from rlhf_ray.weights.fingerprint import fingerprint
from rlhf_ray.weights.gathered_tensors import GatheredTensors
from rlhf_ray.weights.host_buffers import HostBuffers, Wait, bytes_needed
from rlhf_ray.weights.manifest import TensorSpec, as_announced, checksum, expand_fused_groups, pack, plan_buckets, seal

if TYPE_CHECKING:
    from rlhf_ray.weights.direct_sender import Sender

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


class Publication:
    """One rank's part of sending the weights, as buckets of bytes or from GPU to GPU.

    Example, of buckets that travel through the object store::

        publication = Publication(rank, lockstep=False)
        plan = publication.plan(tensors, bucket_bytes=64 * 2**20, fused_groups=[])
        for index in range(plan.whole.buckets):
            bucket = publication.bucket(version, index)  # None on other ranks than 0

    Raises:
        NoWeightsPlan: by methods that need one, if `plan` was not called.
    """

    def __init__(self, rank: int, lockstep: bool) -> None:
        self._rank = rank
        self._lockstep = lockstep
        self._tensors: GatheredTensors | None = None
        self._buckets: SealedBuckets | None = None
        self._sender: Sender | None = None

    def plan(self, tensors: GatheredTensors, bucket_bytes: int, fused_groups: list[list[str]]) -> WeightsPlan:
        """Plan publications of these tensors in buckets of at most `bucket_bytes`.

        Args:
            fused_groups: names of tensors that a generator can only replace together.
        """
        changing = expand_fused_groups(tensors.changing(), fused_groups)
        self._tensors = tensors
        self._buckets = SealedBuckets(tensors.specs(), changing, bucket_bytes, tensors.gather)
        return self._buckets.plan

    def bucket(self, version: int, index: int, whole: bool = True) -> WeightBucket | None:
        """One bucket of the current weights, on rank 0; the others take part in gathering it. Collective under ZeRO-3.

        Args:
            whole: the publication contains all tensors.
        """
        return self._planned().bucket(version, index, whole)

    def connect(self, route: WeightRoute) -> None:
        """Prepare to send weights from GPU to GPU; waits for the generators of a broadcast."""
        from rlhf_ray.weights.direct_sender import open_sender

        self.disconnect()
        self._sender = open_sender(route, self._rank)

    def disconnect(self) -> None:
        """Leave the generators, if connected."""
        sender = self._sender
        self._sender = None  # also if closing it fails
        if sender is not None:
            sender.close()

    def offer(self, version: int, index: int, whole: bool = True) -> WeightOffer | None:
        """As `bucket`, but the bytes stay on the GPU until generators read them or `send` sends them. A collective call
        under ZeRO-3, and if every rank supplies handles."""
        if self._sender is None and not self._lockstep:
            return None
        buckets = self._planned()
        assert self._tensors is not None  # it is set with the plan
        offer, tensors = buckets.offer(version, index, whole, self._tensors.gather_everywhere)
        handles = self._sender.offer(tensors) if self._sender else []
        return None if self._rank else replace(offer, handles=handles)

    def send(self) -> None:
        """Broadcast the offered bucket."""
        if self._sender is not None:
            self._sender.send()

    def release(self) -> None:
        """Free the offered buckets at the end of a publication."""
        if self._sender is not None:
            self._sender.release()

    def unchanged(self) -> dict[str, str] | None:
        """Digests of the tensors that training does not change, on rank 0; errors as in `SealedBuckets.unchanged`."""
        return None if self._rank else self._planned().unchanged()

    def _planned(self) -> SealedBuckets:
        if self._buckets is None:
            raise NoWeightsPlan("this learner has no plan for publishing its weights; call plan_weights first")
        return self._buckets
