"""The receiving side of a publication: accepts a version only when every bucket of it arrived undamaged.

Buckets are verified and *staged* as they arrive; the model is changed once, after the last one. Until then generation
continues with the old version, and an interrupted publication leaves the old weights intact. After an interruption the
receiver is not ready: the learner has newer weights, and responses of this version are not wanted. A damaged bucket
interrupts nothing: it is expected again.

A publication may leave out unchanged tensors. It lists their digests, and a receiver refuses it unless it received
exactly these tensors in publications that it confirmed. Weights it was built with, or had before an interruption, do
not count.

    idle --begin--> receiving --finish--> applying --confirm--> idle (ready, new version)
                        |                     |
                        +-------- fail -------+--> idle (not ready) --begin--> ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.errors import DamagedBucket, WeightsError
from rlhf_ray.records import BucketHead, TensorEntry, WeightBucket, WeightOffer
from rlhf_ray.weights.manifest import require_checksum, verified_tensors


class Stage(Protocol):
    """Holds one publication's tensors until they are applied."""

    def add(self, tensors: Iterable[tuple[TensorEntry, NDArray[np.uint8]]]) -> None:
        """Add one bucket's tensors. The iterator raises `WeightsError` at a damaged tensor; the same bucket may be
        added again then. Tensors are views of memory that is freed when the publication ends; do not write to them."""
        ...


StageT = TypeVar("StageT", bound=Stage)


class Receiver(Generic[StageT]):
    """Verifies publications of a model's weights.

    Args:
        name: the generator's name, for messages.
        version: version of the weights that the model starts with.
        shapes: shape of every tensor that a publication must contain, by name.
        open_stage: creates an empty stage for each publication.
    """

    def __init__(
        self, name: str, version: int, shapes: Mapping[str, tuple[int, ...]], open_stage: Callable[[], StageT]
    ) -> None:
        self.name = name
        self.version = version
        """The confirmed version, with which the model generates."""
        self._shapes = shapes
        self._open_stage = open_stage
        self._publication: tuple[int, int, StageT] | None = None
        self._buckets: set[int] = set()
        self._tensors: dict[str, int] = {}
        self._unchanged: frozenset[str] = frozenset()
        self._digests: dict[str, str] = {}
        self._confirmed: dict[str, str] = {}
        self._failure: str | None = None

    def require_ready(self) -> None:
        """Check that the model may generate.

        Raises:
            WeightsError: a publication failed; the message says why.
        """
        if self._failure is not None:
            raise WeightsError(
                f"{self.name} stays at weights version {self.version} and does not generate: {self._failure}; "
                "publish the weights again from the first bucket"
            )

    def begin(
        self, version: int, count: int, resend: bool = False, unchanged: Mapping[str, str] | None = None
    ) -> None:
        """Expect `count` buckets of `version`. An unfinished publication is dropped.

        Args:
            resend: accept `version` although it is not newer than the confirmed one, as after a learner returned to a
                checkpoint.
            unchanged: digests by name of the tensors that no bucket will contain.

        Raises:
            WeightsError: `version` is not newer without `resend`, `count` is not positive, or an unchanged tensor was
                never received. The receiver stays as it was.
        """
        if version <= self.version and not resend:
            raise WeightsError(
                f"{self.name} has weights version {self.version} and refuses version {version}, which is not newer; "
                "send it with resend=True if it is meant to replace the present weights"
            )
        if count < 1:
            raise WeightsError(f"{self.name}: weights version {version} was announced with {count} buckets; "
                               "announce at least one")
        unsent = unchanged or {}
        absent = [name for name, digest in unsent.items() if self._confirmed.get(name) != digest]
        if absent:
            raise WeightsError(
                f"{self.name} does not have {len(absent)} of {len(unsent)} tensors that weights version {version} "
                f"leaves out, {absent[0]!r} among them; publish the weights whole"
            )
        self._reset()
        self._unchanged = frozenset(unsent)
        self._publication = (version, count, self._open_stage())

    def load(self, bucket: WeightBucket) -> None:
        """Verify and stage one bucket; buckets may arrive in any order.

        Raises:
            DamagedBucket: its bytes or its description are wrong; it may be sent again.
            WeightsError: version or count is wrong; the bucket or a tensor arrived before; the model lacks a tensor or
                has it in another shape. The publication fails.
        """
        stage = self._admit(bucket)
        try:
            stage.add(self._checked(bucket))
        except DamagedBucket:
            raise
        except WeightsError as error:
            self.fail(str(error))
        self._buckets.add(bucket.index)

    def expect(self, offer: WeightOffer) -> None:
        """Check the description of a bucket whose bytes go directly into the model, where they are verified; in any
        order.

        Raises:
            DamagedBucket: its description is wrong.
            WeightsError: as `load`. The publication fails.
        """
        self._admit(offer)
        require_checksum(offer)
        try:
            for entry, digest in zip(offer.entries, offer.digests, strict=True):
                self._record_tensor(entry, digest, offer.index)
        except WeightsError as error:
            self.fail(str(error))
        self._buckets.add(offer.index)

    def finish(self, version: int) -> StageT:
        """The complete publication. Apply it, then call `confirm`, or `fail` if applying failed.

        Raises:
            WeightsError: `version` is not the one being received, or buckets or tensors are missing. The publication
                fails.
        """
        expected, count, stage = self._current("finish")
        if version != expected:
            self.fail(f"finish of version {version} while version {expected} was being received")
        missing = [i for i in range(count) if i not in self._buckets]
        if missing:
            self.fail(f"version {version} ended without bucket(s) {missing} of {count}")
        absent = sorted(self._shapes.keys() - self._tensors.keys() - self._unchanged)
        if absent:
            self.fail(f"version {version} brought {len(self._tensors)} of {len(self._shapes) - len(self._unchanged)} "
                      f"tensors; missing are {', '.join(absent[:4])}{' ...' if len(absent) > 4 else ''}")
        return stage

    def confirm(self) -> int:
        """Note that the staged buckets are in the model; returns the version, which is now the model's."""
        self.version, *_ = self._current("confirm")
        self._failure = None
        self._confirmed |= self._digests
        self._reset()
        return self.version

    def fail(self, reason: str) -> NoReturn:
        """Drop the publication; the receiver is not ready afterwards.

        Raises:
            WeightsError: always, with `reason`.
        """
        self._failure = reason
        self._confirmed.clear()
        self._reset()
        raise WeightsError(f"{self.name} refuses the weights: {reason}")

    def _checked(self, bucket: WeightBucket) -> Iterator[tuple[TensorEntry, NDArray[np.uint8]]]:
        """A bucket's tensors, each verified and expected.

        Raises:
            WeightsError: a tensor is damaged or unexpected.
        """
        for (entry, array), digest in zip(verified_tensors(bucket), bucket.digests, strict=True):
            self._record_tensor(entry, digest, bucket.index)
            yield entry, array

    def _admit(self, bucket: BucketHead) -> StageT:
        """The stage, after checking that the bucket belongs to this publication and has not arrived before."""
        version, count, stage = self._current("a bucket")
        if (bucket.version, bucket.count) != (version, count):
            self.fail(f"bucket {bucket.index} is of version {bucket.version} in {bucket.count} buckets, "
                      f"expected version {version} in {count}")
        if not 0 <= bucket.index < count or bucket.index in self._buckets:
            self.fail(f"bucket {bucket.index} of version {version} arrived twice or is not one of {count}")
        return stage

    def _record_tensor(self, entry: TensorEntry, digest: str, index: int) -> None:
        """Note a tensor of bucket `index`, perhaps once more, if the bucket arrived damaged before.

        Raises:
            WeightsError: the tensor is not expected in this publication.
        """
        if (self._tensors.get(entry.name), self._digests.get(entry.name)) == (index, digest):
            return
        if entry.name in self._unchanged:
            raise WeightsError(f"tensor {entry.name!r} arrived in bucket {index}, but was announced as unchanged")
        if entry.name in self._tensors:
            raise WeightsError(f"tensor {entry.name!r} is in buckets {self._tensors[entry.name]} and {index}")
        if entry.name not in self._shapes:
            raise WeightsError(f"tensor {entry.name!r} is not one of the model's {len(self._shapes)}")
        if entry.shape != self._shapes[entry.name]:
            raise WeightsError(
                f"tensor {entry.name!r} has shape {entry.shape}, the model's is {self._shapes[entry.name]}")
        self._tensors[entry.name] = index
        self._digests[entry.name] = digest

    def _current(self, what: str) -> tuple[int, int, StageT]:
        if self._publication is None:
            raise WeightsError(
                f"{self.name} got {what} while no publication was in progress"
                + (f" (the last one failed: {self._failure})" if self._failure else "") + "; call begin first"
            )
        return self._publication

    def _reset(self) -> None:
        self._publication = None
        self._unchanged = frozenset()
        self._buckets.clear()
        self._tensors.clear()
        self._digests.clear()
