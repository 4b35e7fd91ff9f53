"""Receivers of small tensors, and sealed buckets of these tensors."""

import torch

from rlhf_ray.weights.publication import SealedBuckets
from rlhf_ray.weights.receiver import Receiver

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5), "c": torch.zeros(2, 2)}
SHAPES = {name: tuple(t.shape) for name, t in TENSORS.items()}


class Names:
    """A stage that keeps the tensors' names in their order of arrival."""

    def __init__(self):
        self.names = []

    def add(self, tensors):
        self.names.extend(entry.name for entry, _ in tensors)


def sealed_buckets_of(tensors=TENSORS, changing=None, bucket_bytes=20):
    """Publishes `tensors`; 20 bytes give one of them a bucket."""
    specs = [(n, tuple(t.shape), "float32") for n, t in tensors.items()]
    changing = tensors if changing is None else changing
    return SealedBuckets(specs, changing, bucket_bytes, lambda names: {n: tensors[n] for n in names})


def buckets_of(version, tensors=TENSORS):
    """All buckets of a whole publication, one tensor each."""
    sealed = sealed_buckets_of(tensors)
    return [sealed.bucket(version, i) for i in range(sealed.plan.whole.buckets)]


def make_receiver(version=4, stage=Names):
    """A receiver that stages names."""
    return Receiver("generator/7", version, SHAPES, stage)
