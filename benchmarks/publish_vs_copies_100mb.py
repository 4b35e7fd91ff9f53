"""What trust in published weights costs: a whole publication of 100 MB against copying those bytes twice.

A publication moves every byte twice (into a bucket, out of it into the model) and reads it twice more for the digest.
Ray's object store lies between the two in a run and is left out here, as is what vLLM does with loaded tensors.
"""

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.comparison import Benchmark
from rlhf_ray.config.generation import WeightsConfig
from rlhf_ray.records import WeightBucket
from rlhf_ray.weights.manifest import plan_buckets, unpack
from rlhf_ray.weights.publisher import Publication
from rlhf_ray.weights.receiver import Receiver

TENSORS, SHAPE = 100, (500, 500)
"""100 float32 matrices of 1 MB."""
PUBLICATIONS = 5
"""In a turn; one alone is over too soon to be timed well."""


class Weights:
    """The learner's weights and the model's that receives them."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        random = torch.Generator().manual_seed(0)
        self.sent = torch.randn(TENSORS, *SHAPE, generator=random)
        self.received = torch.zeros_like(self.sent)
        self._version = 0

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """The matrices of `weights` [N, rows, columns] by name."""
        return {f"layers.{i}.weight": matrix for i, matrix in enumerate(weights)}

    def proof(self) -> list[float]:
        """Sum of each received matrix, which is then wiped, so that every turn has to bring it again.

        Raises:
            RuntimeError: what was received is not what was sent.
        """
        if not torch.equal(self.sent, self.received):
            raise RuntimeError("the weights that were received are not those that were sent")
        sums = self.received.double().sum((1, 2)).tolist()
        self.received.zero_()
        return sums


class PublicationSide(Weights):
    """Gather, pack and seal; verify; load the views into the model. Buckets as large as the default."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._source, self._target = self.named(self.sent), self.named(self.received)
        specs = [(name, SHAPE, "float32") for name in self._source]
        self._plan = plan_buckets(specs, WeightsConfig().bucket_mb << 20)
        shapes = dict.fromkeys(self._source, SHAPE)
        self._receiver: Receiver[WeightBucket] = Receiver("benchmark", 0, shapes, stage=lambda bucket: bucket)

    def run(self) -> float:
        """Some publications, each of a version of its own; returns how many."""
        for _ in range(PUBLICATIONS):
            self._version += 1
            self._publish(self._version)
        return PUBLICATIONS

    def _publish(self, version: int) -> None:
        publication = Publication(version, self._plan, lambda names: {name: self._source[name] for name in names})
        self._receiver.begin(version, publication.count)
        for index in range(publication.count):
            bucket = publication.bucket(index)
            assert bucket is not None
            self._receiver.load(bucket)
        for bucket in self._receiver.finish(version):
            for name, tensor in unpack(bucket.entries, bucket.data):
                self._target[name].copy_(tensor)
        self._receiver.confirm()


class CopiesSide(Weights):
    """The same bytes copied twice in one piece each, into memory that is there already."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._between = torch.zeros_like(self.sent)

    def run(self) -> float:
        """Two copies as often as there are publications; returns how often."""
        for _ in range(PUBLICATIONS):
            self._between.copy_(self.sent)
            self.received.copy_(self._between)
        return PUBLICATIONS


BENCHMARK = Benchmark(
    ours=PublicationSide, theirs=CopiesSide, ours_is="pack, seal, verify, load", theirs_is="two plain copies",
    unit="s", goal=2.5,
)
