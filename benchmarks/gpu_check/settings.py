"""How large the check is: a model of half a billion weights on a GPU, a tiny one where it is rehearsed on a CPU."""

from dataclasses import dataclass

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ArchitectureConfig
from rlhf_ray.config.run import PoolConfig

PROMPT_TOKENS = 32
"""Room for the longest prompt."""
ALGORITHM = AlgorithmConfig(epochs=1, mini_batches=1, whiten_advantages=False)
"""One optimizer step over all rows."""


@dataclass(frozen=True)
class Round:
    """One team of a generator and a learner, and the transport between them."""

    transport: str
    zero_stage: int
    apart: bool = False
    """On a GPU each."""


@dataclass(frozen=True)
class Scale:
    """One size of the check."""

    gpu: bool
    architecture: ArchitectureConfig
    dtype: str
    rows: int
    response: int
    """Tokens of each response."""
    tolerance: float
    """Largest mean difference of generator's and learner's log-probabilities under the same weights."""
    publications: int = 3

    @property
    def context(self) -> int:
        """Longest prompt and response, in tokens."""
        return PROMPT_TOKENS + self.response

    def rounds(self, gpus: int) -> list[Round]:
        """What is tried: each transport that so many GPUs allow. NCCL wants two; on CPUs gloo stands in for it."""
        if not self.gpu:
            return [Round("object_store", 1), Round("nccl", 3)]
        apart = [Round("nccl", 1, apart=True)] if gpus > 1 else []
        return [Round("object_store", 1), Round("ipc", 3), *apart]

    def generation(self, apart: bool) -> GenerationConfig:
        """The generator's section."""
        shape = {"engine": "async", "max_sequences": self.rows, "chunk": self.rows, "cpus": 0.5,
                 "sampling": SamplingConfig(max_tokens=self.response), "kv_cache_mb": 4096 if self.gpu else 64}
        if self.gpu:
            shape |= {"gpus": 1.0 if apart else 0.5, "sleep_level": 2}
        return GenerationConfig(**shape)

    def policy(self, zero_stage: int, apart: bool) -> PolicyConfig:
        """The learner's section."""
        return PolicyConfig(
            zero_stage=zero_stage, micro_batch_tokens=16 * self.context, cpus=0.5,
            autocast="bfloat16" if self.gpu else "float32", gpus=(1.0 if apart else 0.5) if self.gpu else 0.0,
            offload_between_phases=self.gpu)

    def pool(self, apart: bool) -> PoolConfig:
        """Where both live."""
        return PoolConfig(bundles=2 if apart else 1, cpus=1 if apart else 2, gpus=1 if self.gpu else 0)


ON_GPU = Scale(
    gpu=True, dtype="bfloat16", rows=256, response=256, tolerance=0.05,
    architecture=ArchitectureConfig(hidden_size=1024, layers=28, heads=16, kv_heads=8, intermediate_size=4096,
                                    max_positions=512))
"""Half a billion weights. The tolerance is bfloat16's: two kernels that round in another order."""
ON_CPU = Scale(
    gpu=False, dtype="float32", rows=8, response=24, tolerance=1e-4,
    architecture=ArchitectureConfig(hidden_size=128, layers=2, heads=2, intermediate_size=384, max_positions=96))
