"""The receiving side of a publication: lets a version through only when every bucket of it arrived undamaged.

Buckets are verified and *staged* as they come; the model is touched once, when the last one is there. Until then
generation goes on with the old version, and a publication that breaks off leaves the old weights whole. After such a
break the receiver is not ready: the sender has moved on, and what this version would generate is not wanted.

A publication may leave out tensors that have not changed. It names them by digest, and a receiver that did not get
exactly these in a publication that it confirmed refuses it: what it was built with, or had before a break, does not
count.

    idle --begin--> receiving --finish--> applying --confirm--> idle (ready, new version)
                        |                     |
                        +-------- fail -------+--> idle (not ready) --begin--> ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.errors import WeightsError
from rlhf_ray.records import TensorEntry, WeightBucket, WeightOffer
from rlhf_ray.weights.manifest import require_checksum, verified


class Stage(Protocol):
    """Where one publication's tensors wait to be applied."""

    def add(self, tensors: Iterable[tuple[TensorEntry, NDArray[np.uint8]]]) -> None:
        """Take in one bucket's tensors; asking for the next one raises `WeightsError` when that one is damaged. They
        are views of memory that goes when the publication is over, and must not be written to."""
        ...


StageT = TypeVar("StageT", bound=Stage)


class Receiver(Generic[StageT]):
    """Gate in front of a model's weights.

    Args:
        name: whose weights they are, for messages.
        version: version of the weights that the model starts with.
        shapes: shape of every tensor that a publication has to bring, by name.
        open_stage: makes an empty stage, for each publication one.
    """

    def __init__(
        self, name: str, version: int, shapes: Mapping[str, tuple[int, ...]], open_stage: Callable[[], StageT]
    ) -> None:
        self.name = name
        self.version = version
        """The confirmed version: what the model computes with."""
        self._shapes = shapes
        self._open_stage = open_stage
        self._coming: tuple[int, int, StageT] | None = None
        self._buckets: set[int] = set()
        self._tensors: dict[str, int] = {}
        self._left_out: frozenset[str] = frozenset()
        self._digests: dict[str, str] = {}
        self._held: dict[str, str] = {}
        self._broken: str | None = None

    @property
    def ready(self) -> bool:
        """False after a publication broke off, until a later one is confirmed."""
        return self._broken is None

    def require_ready(self) -> None:
        """Raise unless the model may generate.

        Raises:
            WeightsError: a publication broke off; says which and why.
        """
        if self._broken is not None:
            raise WeightsError(
                f"{self.name} stays at weights version {self.version} and does not generate: {self._broken}; "
                "publish the weights again from the first bucket"
            )

    def begin(
        self, version: int, count: int, resend: bool = False, unchanged: Mapping[str, str] | None = None
    ) -> None:
        """Expect `count` buckets of `version`. An unfinished publication is dropped and begun anew.

        Args:
            resend: take `version` although it is not newer than the confirmed one, as after a learner went back to a
                checkpoint.
            unchanged: digests of the tensors that no bucket will bring, by name.

        Raises:
            WeightsError: `version` is not newer and this is no `resend`, `count` is not positive, or a tensor that is
                not to be sent is not here. Breaks nothing.
        """
        if version <= self.version and not resend:
            raise WeightsError(
                f"{self.name} has weights version {self.version} and refuses version {version}, which is not newer; "
                "send it with resend=True if it is meant to replace what is there"
            )
        if count < 1:
            raise WeightsError(f"{self.name}: weights version {version} was announced with {count} buckets")
        known = unchanged or {}
        absent = [name for name, digest in known.items() if self._held.get(name) != digest]
        if absent:
            raise WeightsError(
                f"{self.name} does not have {len(absent)} of {len(known)} tensors that weights version {version} "
                f"leaves out, {absent[0]!r} among them; publish the weights whole"
            )
        self._forget()
        self._left_out = frozenset(known)
        self._coming = (version, count, self._open_stage())

    def load(self, bucket: WeightBucket) -> None:
        """Verify and stage one bucket; any order.

        Raises:
            WeightsError: wrong version, number or checksum; a bucket or tensor that came before; a tensor that the
                model does not have, or has in another shape. Fails the publication.
        """
        stage = self._admit(bucket)
        try:
            stage.add(self._checked(bucket))
        except WeightsError as error:
            self.fail(str(error))
        self._buckets.add(bucket.index)

    def expect(self, offer: WeightOffer) -> None:
        """Check the description of a bucket whose bytes go straight into the model, which verifies their digests; any
        order.

        Raises:
            WeightsError: as `load`, but for the digests of bytes. Fails the publication.
        """
        self._admit(offer)
        try:
            require_checksum(offer)
            for entry, digest in zip(offer.entries, offer.digests, strict=True):
                self._want(entry, digest, offer.index)
        except WeightsError as error:
            self.fail(str(error))
        self._buckets.add(offer.index)

    def finish(self, version: int) -> StageT:
        """The whole publication, to be applied now; then call `confirm`, or `fail` if applying failed.

        Raises:
            WeightsError: `version` is not the one being received, or buckets or tensors are missing. Fails the
                publication.
        """
        coming, count, stage = self._expected("finish")
        if version != coming:
            self.fail(f"finish of version {version} while version {coming} was coming")
        missing = [i for i in range(count) if i not in self._buckets]
        if missing:
            self.fail(f"version {version} ended without bucket(s) {missing} of {count}")
        absent = sorted(self._shapes.keys() - self._tensors.keys() - self._left_out)
        if absent:
            self.fail(f"version {version} brought {len(self._tensors)} of {len(self._shapes) - len(self._left_out)} "
                      f"tensors; missing are {', '.join(absent[:4])}{' ...' if len(absent) > 4 else ''}")
        return stage

    def confirm(self) -> int:
        """The staged buckets are in the model: their version is the model's from here on. Returns it."""
        self.version, *_ = self._expected("confirm")
        self._broken = None
        self._held |= self._digests
        self._forget()
        return self.version

    def fail(self, reason: str) -> NoReturn:
        """Drop the publication and stop being ready.

        Raises:
            WeightsError: always, with `reason`.
        """
        self._broken = reason
        self._held.clear()
        self._forget()
        raise WeightsError(f"{self.name} refuses the weights: {reason}")

    def _checked(self, bucket: WeightBucket) -> Iterator[tuple[TensorEntry, NDArray[np.uint8]]]:
        """A bucket's tensors, each verified and wanted.

        Raises:
            WeightsError: one is not.
        """
        for (entry, array), digest in zip(verified(bucket), bucket.digests, strict=True):
            self._want(entry, digest, bucket.index)
            yield entry, array

    def _admit(self, bucket: WeightBucket | WeightOffer) -> StageT:
        """The stage, for a bucket of this publication that did not come before."""
        version, count, stage = self._expected("a bucket")
        if (bucket.version, bucket.count) != (version, count):
            self.fail(f"bucket {bucket.index} is of version {bucket.version} in {bucket.count} buckets, "
                      f"expected version {version} in {count}")
        if not 0 <= bucket.index < count or bucket.index in self._buckets:
            self.fail(f"bucket {bucket.index} of version {version} came twice or is not one of {count}")
        return stage

    def _want(self, entry: TensorEntry, digest: str, index: int) -> None:
        """Note a tensor of bucket `index`.

        Raises:
            WeightsError: nobody asked for it.
        """
        if entry.name in self._left_out:
            raise WeightsError(f"tensor {entry.name!r} came in bucket {index} and was to be left out")
        if entry.name in self._tensors:
            raise WeightsError(f"tensor {entry.name!r} is in buckets {self._tensors[entry.name]} and {index}")
        if entry.name not in self._shapes:
            raise WeightsError(f"tensor {entry.name!r} is not one of the model's {len(self._shapes)}")
        if entry.shape != self._shapes[entry.name]:
            raise WeightsError(
                f"tensor {entry.name!r} has shape {entry.shape}, the model's is {self._shapes[entry.name]}")
        self._tensors[entry.name] = index
        self._digests[entry.name] = digest

    def _expected(self, what: str) -> tuple[int, int, StageT]:
        if self._coming is None:
            raise WeightsError(
                f"{self.name} got {what} while no publication was under way"
                + (f" (the last one broke off: {self._broken})" if self._broken else "") + "; call begin first"
            )
        return self._coming

    def _forget(self) -> None:
        self._coming = None
        self._left_out = frozenset()
        self._buckets.clear()
        self._tensors.clear()
        self._digests.clear()
