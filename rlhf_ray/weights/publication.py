"""The learner's side of publications: one rank's part of sending the weights to the generators."""

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_ray.errors import NoWeightsPlan
from rlhf_ray.records import WeightBucket, WeightOffer, WeightRoute, WeightsPlan
from rlhf_ray.weights.gathered_tensors import GatheredTensors
from rlhf_ray.weights.manifest import expand_fused_groups
from rlhf_ray.weights.sealed_buckets import SealedBuckets

if TYPE_CHECKING:
    from rlhf_ray.weights.direct_sender import Sender


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
        sender, self._sender = self._sender, None
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
