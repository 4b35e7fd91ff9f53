"""Time of rollouts: prefill, and decoding limited by operations, by memory bandwidth and by the cache's room."""

from dataclasses import dataclass
from math import inf

from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.workload import Workload

SLICES = 256
"""Of the integral over response positions."""


@dataclass(frozen=True)
class Engine:
    """One generator: a model on some GPUs of a node (tensor parallel)."""

    model: ModelShape
    hardware: Hardware
    gpus: int

    @property
    def cache_tokens(self) -> float:
        """Room of the cache beside the weights, in tokens; negative where not even the weights fit."""
        room = self.gpus * self.hardware.memory_bytes * self.hardware.usable_memory - self.model.weight_bytes
        return room / self.model.cache_bytes

    def decode_s(self, batch: float, context: float) -> float:
        """One decoding step of `batch` sequences that hold `context` tokens each: the larger of reading weights and
        cache and of the operations (Pope et al. 2022, section 2), then two all-reduces a layer."""
        m, h = self.model, self.hardware
        read = (m.weight_bytes + batch * context * m.cache_bytes) / (self.gpus * h.memory_bandwidth * h.memory_share)
        compute = batch * m.token_flops(context) / (self.gpus * h.flops * h.forward_share)
        return max(read, compute) + self._communicate_s(batch) + h.step_s

    def reads_most(self, batch: float, context: float) -> bool:
        """Whether a decoding step waits for memory rather than for operations."""
        m, h = self.model, self.hardware
        read = (m.weight_bytes + batch * context * m.cache_bytes) / (h.memory_bandwidth * h.memory_share)
        return read > batch * m.token_flops(context) / (h.flops * h.forward_share)

    def prefill_s(self, tokens: int) -> float:
        """One prompt of `tokens`."""
        return self.model.row_flops(tokens) / (self.gpus * self.hardware.flops * self.hardware.forward_share)

    def fitting(self, work: Workload) -> float:
        """Sequences that the cache has room for at a time."""
        return max(0.0, self.cache_tokens / work.held)

    def batch_s(self, work: Workload, samples: float) -> float:
        """To draw `samples` from the first to the last, none begun before: at first as many as fit, each replaced when
        it ends; then the last ones run out, and the longest decodes nearly alone."""
        fitting = self.fitting(work)
        if fitting < 1:
            return inf
        begun_together = min(samples, fitting)
        before = (samples - begun_together) * self._each_s(work, begun_together)
        return samples * self.prefill_s(work.prompt) + before + self._run_out_s(work, begun_together)

    def flowing_s(self, work: Workload, samples: float, under_way: float) -> float:
        """To draw `samples` when there are always others to begin: never more than `under_way` or the cache's room at a
        time."""
        batch = min(under_way, self.fitting(work))
        if batch < 1:
            return inf
        return samples * (self.prefill_s(work.prompt) + self._each_s(work, batch))

    def longest_s(self, work: Workload, under_way: float) -> float:
        """To draw a batch's longest response among `under_way` others."""
        batch = min(under_way, self.fitting(work))
        return work.longest * self.decode_s(batch, work.held) if batch >= 1 else inf

    def _each_s(self, work: Workload, batch: float) -> float:
        return work.response * self.decode_s(batch, work.held) / batch

    def _run_out_s(self, work: Workload, batch: float) -> float:
        """Integral over positions of a step with the survivors of `batch`, up to the longest response."""
        width = work.longest / SLICES
        positions = [(i + 0.5) * width for i in range(SLICES)]
        return sum(width * self.decode_s(max(1.0, batch * work.survivors(t)), work.prompt + t) for t in positions)

    def _communicate_s(self, batch: float) -> float:
        """Two all-reduces a layer of the activations of `batch` tokens; a ring moves 2 (n - 1) / n of the bytes."""
        if self.gpus == 1:
            return 0.0
        m, h = self.model, self.hardware
        moved = 2 * (self.gpus - 1) / self.gpus * batch * m.hidden * m.bytes_per_value
        return 2 * m.layers * (h.collective_s + moved / (h.link_bandwidth * h.network_share))
