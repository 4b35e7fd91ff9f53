"""Times of generation and gathering by operations, bytes and bandwidths (a roofline model); those of scoring and
training are in `step_time`.

`Workload` is the batch, `Engine` one vLLM generator (prefill and decoding).
"""

from dataclasses import dataclass
from math import ceil, inf

from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.model_shape import ModelShape


@dataclass(frozen=True)
class Workload:
    """One batch: number of samples, their lengths, and optimizer steps.

    Response lengths t have the survivor function S(t) = (1 - t / (tail * response)) ** (tail - 1): a Beta distribution
    with mean `response` and maximum `tail * response`. A tail of 2 is uniform from 0; with a tail of 1 all lengths are
    equal.
    """

    samples: int = 2048
    """Samples of one update."""
    prompt: int = 512
    """Tokens of a prompt."""
    response: int = 1024
    """Mean tokens of a response."""
    tail: float = 4.0
    """Maximum response length over the mean."""
    mini_batches: int = 4
    """Optimizer steps per epoch; 512 samples each by default (as Yu et al. 2025, DAPO, section 4.1)."""
    epochs: int = 1
    turns: int = 1
    """Turns of a sample, among which `response` and `read` are divided evenly."""
    read: int = 0
    """Mean tokens that the environment answers in an episode."""
    prefix_cached: bool = True
    """A turn's prefill computes what is new since the turn before; else all that came before the turn."""

    @property
    def row(self) -> int:
        """Mean tokens of a sample."""
        return self.prompt + self.response + self.read

    @property
    def prefills(self) -> list[int]:
        """Tokens that are prefilled for a sample: before each turn, or together where the cache has those before."""
        if self.prefix_cached or self.turns == 1:
            return [self.prompt + self.read]
        grown = (self.response + self.read) / self.turns
        return [round(self.prompt + turn * grown) for turn in range(self.turns)]

    def survivors(self, t: float) -> float:
        """Share of responses longer than `t` tokens."""
        return (1 - t / (self.tail * self.response)) ** (self.tail - 1) if t < self.tail * self.response else 0.0

    @property
    def longest(self) -> float:
        """Expected tokens of a batch's longest response: the length that one sample of the batch exceeds."""
        if self.tail == 1:
            return self.response
        return self.tail * self.response * (1 - (1 / self.samples) ** (1 / (self.tail - 1)))

    @property
    def held(self) -> float:
        """Mean tokens in the cache of a sample being decoded: its prompt, the response so far, and half of what the
        environment answers. Long responses are decoded longer: the integral of t S(t) over that of S(t) is
        tail * response / (tail + 1)."""
        return self.prompt + self.read / 2 + self.tail * self.response / (self.tail + 1)


SLICES = 256
"""Slices of the integral over response positions."""
UNDER_WAY = 10
"""Numbers of sequences under way that are tried, each a square root of two fewer than the one before."""


@dataclass(frozen=True)
class Engine:
    """One generator: a model on one or more GPUs of a node (tensor parallel)."""

    model: ModelShape
    hardware: Hardware
    gpus: int

    @property
    def cache_tokens(self) -> float:
        """Capacity of the KV cache in tokens, after the weights; negative if the weights do not fit."""
        free = self.gpus * self.hardware.memory_bytes * self.hardware.usable_memory - self.model.weight_bytes
        return free / self.model.cache_bytes

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds of one decoding step of `batch` sequences with `context` tokens each: the larger of the times to read
        weights and cache and to compute (Pope et al. 2022, section 2), plus two all-reduces per layer."""
        m, h = self.model, self.hardware
        read = m.read_bytes(batch) + batch * context * m.cache_bytes
        reading = read / (self.gpus * h.memory_bandwidth * h.memory_share)
        compute = batch * m.token_flops(context) / (self.gpus * h.flops * h.forward_share)
        return max(reading, compute) + self._communicate_s(batch) + h.step_s

    def prefill_s(self, tokens: int) -> float:
        """Seconds to prefill one prompt of `tokens`."""
        return self.model.row_flops(tokens) / (self.gpus * self.hardware.flops * self.hardware.forward_share)

    def prefills_s(self, work: Workload) -> float:
        """Seconds of all prefills of a sample."""
        return sum(self.prefill_s(tokens) for tokens in work.prefills)

    def fitting(self, work: Workload) -> float:
        """Sequences that fit into the cache at the same time."""
        return max(0.0, self.cache_tokens / work.held)

    def step_s(self, work: Workload, samples: float, staleness: int, most: float = inf) -> float:
        """Seconds in which the engine generates its `samples` of a step, with at most `most` sequences at a time.

        With a staleness of 0 or 1 a batch is whole before it is trained on, its longest response included. From 2 on
        responses may span publications, so generation never runs out of work, as long as the longest response takes no
        more than (staleness - 1) steps. Fewer sequences under way make each of them faster and all of them slower, so
        the best of some numbers is taken.
        """
        options = [self.batch_s(work, samples, most)]  # the staleness that is allowed need not be used
        for number in range(UNDER_WAY if staleness > 1 else 0):
            under_way = max(1.0, min(staleness * samples, most) / 2 ** (number / 2))
            options.append(max(self.flowing_s(work, samples, under_way),
                               self.longest_s(work, under_way) / (staleness - 1)))
        return min(options)

    def batch_s(self, work: Workload, samples: float, most: float = inf) -> float:
        """Seconds to generate `samples`, none started before: first as many as fit (and no more than `most`), each
        replaced when it ends; then the last ones finish, and the longest decodes nearly alone."""
        fitting = min(self.fitting(work), most)
        if fitting < 1:
            return inf
        concurrent = min(samples, fitting)
        before = (samples - concurrent) * self._each_s(work, concurrent)
        return samples * self.prefills_s(work) + before + self._drain_s(work, concurrent)

    def flowing_s(self, work: Workload, samples: float, under_way: float) -> float:
        """Seconds to generate `samples` in a steady flow, with at most `under_way` sequences (or as many as the cache
        holds) at the same time."""
        batch = min(under_way, self.fitting(work))
        if batch < 1:
            return inf
        return samples * (self.prefills_s(work) + self._each_s(work, batch))

    def longest_s(self, work: Workload, under_way: float) -> float:
        """Seconds to generate a batch's longest response among `under_way` others."""
        batch = min(under_way, self.fitting(work))
        return work.longest * self.decode_s(batch, work.held) if batch >= 1 else inf

    def _each_s(self, work: Workload, batch: float) -> float:
        return work.response * self.decode_s(batch, work.held) / batch

    def _drain_s(self, work: Workload, batch: float) -> float:
        """Integral over positions of a decoding step with the survivors of `batch`, up to the longest response."""
        width = work.longest / SLICES
        positions = [(i + 0.5) * width for i in range(SLICES)]
        before = work.prompt + work.read / 2
        return sum(width * self.decode_s(max(1.0, batch * work.survivors(t)), before + t) for t in positions)

    def _communicate_s(self, batch: float) -> float:
        """Two all-reduces per layer of the activations of `batch` tokens; a ring moves 2 (n - 1) / n of the bytes."""
        if self.gpus == 1:
            return 0.0
        m, h = self.model, self.hardware
        moved = 2 * (self.gpus - 1) / self.gpus * batch * m.hidden * m.bytes_per_value
        return 2 * m.layers * (h.collective_s + moved / (h.link_bandwidth * h.network_share))


STATE_BYTES = 16
"""Bytes per parameter of weight, gradient and AdamW's two moments in float32 (Rajbhandari et al. 2020, section 3.1,
count the same 16 for mixed precision)."""
WEIGHT_BYTES = 4
"""Bytes of a weight in float32: in the optimizer, in addition to the shard that is gathered (`learner_memory`), and as
gathered for training."""
RECOMPUTED = 4.0
"""Operations in units of a forward pass, with activation checkpointing: forward, backward (two), and forward again
(Korthikanti et al. 2022, section 5)."""
KEPT = 3.0
"""The same if activations are kept."""


def gather_s(model: ModelShape, hardware: Hardware, gpus: int, value_bytes: int = WEIGHT_BYTES) -> float:
    """Seconds to gather every weight on every one of `gpus` once, at `value_bytes` each: each node receives the weights
    it lacks over its network cards, and each GPU over its link; the slower of the two counts. Each layer is a call,
    which goes around a ring of all GPUs: a step for each but one, of which those between nodes take longer (as NCCL
    counts an all-gather and a reduce-scatter, src/graph/tuning.cc)."""
    nodes = max(1.0, gpus / hardware.gpus_per_node)
    between, received = ceil(nodes) - 1, model.parameters * value_bytes * (1 - 1 / gpus)
    outside = received * (1 - 1 / nodes) / hardware.network_bandwidth
    ring = (gpus - 1 - between) * hardware.hop_s + between * hardware.network_hop_s
    return max(outside, received / hardware.link_bandwidth) / hardware.network_share + model.layers * ring
