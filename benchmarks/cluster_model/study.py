"""The question put to the model: every number of GPUs, every staleness, the best split of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cluster_model.gpu_split import STALENESS, TENSOR_PARALLEL, Step, best, smallest_good, taking_turns
from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.model_shape import LLAMA_70B, ModelShape
from rlhf_ray.planning.roofline import Workload

GPU_COUNTS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Answer:
    """What the model says of one number of GPUs."""

    gpus: int
    by_staleness: list[Step]
    """The best split of each staleness, ascending."""
    turns: Step | None
    """All roles sharing all GPUs; None where that does not fit."""
    recommended: Step
    """The least stale of those within 2% of the fastest."""


def answer(hardware: Hardware, work: Workload, gpus: int, policy: ModelShape = LLAMA_70B) -> Answer | None:
    """All that can be said of `gpus`; None where the model does not fit on them."""
    found = [made for staleness in STALENESS if (made := best(policy, hardware, work, gpus, staleness))]
    if not found:
        return None
    turns = min((taking_turns(policy, hardware, work, gpus, parallel) for parallel in TENSOR_PARALLEL),
                key=lambda made: made.seconds)
    return Answer(gpus, found, turns if turns.seconds < float("inf") else None, smallest_good(found))


def answers(hardware: Hardware, work: Workload, counts: Sequence[int] = GPU_COUNTS) -> list[Answer]:
    """Those numbers of GPUs on which the model fits."""
    return [found for gpus in counts if (found := answer(hardware, work, gpus))]
