"""Time of forward passes and updates of a model whose weights are sharded over its GPUs (ZeRO-3)."""

from dataclasses import dataclass
from math import ceil, inf

from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.workload import Workload

STATE_BYTES = 16
"""A parameter's: weight, gradient and AdamW's two moments in float32 (Rajbhandari et al. 2020, section 3.1, count the
same 16 for mixed precision)."""
WEIGHT_BYTES = 4
"""A parameter's weight in float32: as its optimizer has it, beside the shard that is gathered (`learner_memory`), and
as it is gathered for training."""
RECOMPUTED = 4.0
"""Passes' worth of operations: forward, backward (two) and the forward pass again, with activation checkpointing
(Korthikanti et al. 2022, section 5)."""
KEPT = 3.0
"""The same where activations are kept."""


@dataclass(frozen=True)
class Duration:
    """Seconds, and what they are bound by."""

    seconds: float
    bound: str

    def __add__(self, other: "Duration") -> "Duration":
        """One after the other; bound by what the longer is bound by."""
        return Duration(self.seconds + other.seconds, max(self, other, key=lambda part: part.seconds).bound)


@dataclass(frozen=True)
class Group:
    """A model under training on a group of GPUs, with a frozen one of its size beside it that only scores."""

    model: ModelShape
    hardware: Hardware
    gpus: int
    passes: float = RECOMPUTED

    @property
    def nodes(self) -> float:
        """Nodes that the group covers."""
        return max(1.0, self.gpus / self.hardware.gpus_per_node)

    @property
    def micro_batch_tokens(self) -> float:
        """Tokens whose activations fit a GPU beside the shards of both models and two gathered layers: with
        checkpointing a layer keeps its input, and one layer at a time all of it (Korthikanti et al. 2022, eq. 2)."""
        m, h = self.model, self.hardware
        shards = m.parameters * (STATE_BYTES + WEIGHT_BYTES + m.bytes_per_value) / self.gpus
        gathered = 2 * m.weight_bytes / m.layers
        room = h.memory_bytes * h.usable_memory - shards - gathered
        return room / (m.hidden * (m.bytes_per_value * m.layers + 34))

    def fits(self, work: Workload) -> bool:
        """Whether the longest row fits."""
        return self.micro_batch_tokens >= work.prompt + work.longest

    def gather_s(self, value_bytes: int = WEIGHT_BYTES) -> float:
        """To bring every weight to every GPU once, in so many bytes each: each node takes in what it does not hold over
        its cards, and each GPU over its link; the slower of the two counts."""
        h, bytes_ = self.hardware, self.model.parameters * value_bytes * (1 - 1 / self.gpus)
        outside = bytes_ * (1 - 1 / self.nodes) / h.network_bandwidth
        return max(outside, bytes_ / h.link_bandwidth) / h.network_share

    def score(self, work: Workload, models: int) -> Duration:
        """A forward pass over the batch through each of `models` of this size, overlapped with gathering weights."""
        compute = models * work.samples * self.model.row_flops(work.row) / (
            self.gpus * self.hardware.flops * self.hardware.forward_share)
        gathers = models * ceil(work.samples * work.row / self.gpus / self.micro_batch_tokens)
        return longer(Duration(compute, "operations of scoring"),
                      Duration(gathers * self.gather_s(self.model.bytes_per_value), "network of scoring"))

    def update(self, work: Workload) -> Duration:
        """All optimizer steps of an update. Each micro-batch gathers the weights twice and scatters gradients once
        (three times the weights, Rajbhandari et al. 2020, section 7.2.2), while it computes."""
        if not self.fits(work):
            return Duration(inf, "memory of a learner")
        h, rows = self.hardware, work.samples / work.mini_batches
        busy = min(1.0, rows / self.gpus)  # a row is not cut: GPUs without one wait
        flops = rows * self.passes * self.model.row_flops(work.row)
        compute = Duration(flops / (self.gpus * busy * h.flops * h.training_share),
                           "operations of training" if busy == 1 else "rows of a mini-batch")
        micro_batches = ceil(rows * work.row / self.gpus / self.micro_batch_tokens)
        network = Duration(3 * micro_batches * self.gather_s(), "network of training")
        adam = 2 * STATE_BYTES * self.model.parameters / (self.gpus * h.memory_bandwidth * h.memory_share)
        step = longer(compute, network)
        return Duration((step.seconds + adam) * work.mini_batches * work.epochs, step.bound)


def longer(*parts: Duration) -> Duration:
    """Of things done at the same time, the one that lasts."""
    return max(parts, key=lambda part: part.seconds)
