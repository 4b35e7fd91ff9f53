"""One generator and one learner: how large they are on a GPU and in a rehearsal, and what differs between checks."""

from dataclasses import dataclass
from typing import Any

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.learner import LoRAConfig, OptimizerConfig, PolicyConfig
from rlhf_ray.config.model import ArchitectureConfig
from rlhf_ray.config.run import PoolConfig
from rlhf_ray.planning.local_machine import installed

PROMPT_TOKENS = 32
"""Room for the longest prompt."""
ALGORITHM = AlgorithmConfig(epochs=1, mini_batches=1, estimator={"type": "gae", "whiten": False})
"""One optimizer step over all rows."""


VLLM_TORCH = (2, 13)
"""The torch that vLLM 0.32 is made for."""


def engine_arguments() -> dict[str, Any]:
    """Of a generator on a GPU: with an older torch, models are not compiled, and decoding has CUDA graphs."""
    found = tuple(int(number) for number in (installed("torch") or "0.0").split(".")[:2])
    return {"compilation_config": {"mode": 0}} if found < VLLM_TORCH else {}


@dataclass(frozen=True)
class Scale:
    """One size of the check."""

    gpu: bool
    architecture: ArchitectureConfig
    dtype: str
    vocabulary: int
    """Rows of the embedding; those beyond the tokenizer's are random, too, and may be sampled."""
    rows: int
    response: int
    """Tokens of each response."""
    tolerance: float
    """Largest mean difference of generator's and learner's log-probabilities under the same weights."""
    episode: int
    """Tokens of an episode of several turns at most."""
    publications: int = 3

    @property
    def context(self) -> int:
        """Longest prompt and response, in tokens."""
        return PROMPT_TOKENS + self.response


@dataclass(frozen=True)
class PairSetting:
    """A generator and a learner, and the transport between them."""

    scale: Scale
    transport: str = "object_store"
    zero_stage: int = 1
    sleep_level: int = 0
    """Of the generator, on a GPU."""
    apart: bool = False
    """On a GPU each."""
    lora: LoRAConfig | None = None
    """Train adapters, and publish them alone."""

    @property
    def generation(self) -> GenerationConfig:
        """The generator's section."""
        scale = self.scale
        shape: dict[str, Any] = {
            "engine": "async", "max_sequences": scale.rows, "chunk": scale.rows, "cpus": 0.5,
            "sampling": SamplingConfig(max_tokens=scale.response), "kv_cache_mb": 4096 if scale.gpu else 64}
        if scale.gpu:
            shape |= {"gpus": 1.0 if self.apart else 0.5, "sleep_level": self.sleep_level, "vllm": engine_arguments()}
        return GenerationConfig(**shape)

    @property
    def policy(self) -> PolicyConfig:
        """The learner's section."""
        gpu = self.scale.gpu
        # Adapters begin without effect; this moves them by as much as a generator can see.
        optimizer = OptimizerConfig(learning_rate=1e-2 if self.lora else 1e-6)
        return PolicyConfig(
            zero_stage=self.zero_stage, micro_batch_tokens=16 * self.scale.context, cpus=0.5, lora=self.lora,
            autocast="bfloat16" if gpu else "float32", gpus=(1.0 if self.apart else 0.5) if gpu else 0.0,
            offload_between_phases=gpu, optimizer=optimizer, compile_layers=False)  # which takes a minute

    @property
    def pool(self) -> PoolConfig:
        """Where both live."""
        gpus = 1 if self.scale.gpu else 0
        return PoolConfig(bundles=2 if self.apart else 1, cpus=1 if self.apart else 2, gpus=gpus)


ON_GPU = Scale(
    gpu=True, dtype="bfloat16", vocabulary=128_256, rows=256, response=256, tolerance=0.05, episode=2048,
    architecture=ArchitectureConfig(hidden_size=1024, layers=28, heads=16, kv_heads=8, intermediate_size=4096,
                                    max_positions=2048))
"""Half a billion weights, a quarter of them the embedding of Llama 3's vocabulary. The tolerance is bfloat16's: two
kernels that round in another order."""
ON_CPU = Scale(
    gpu=False, dtype="float32", vocabulary=1280, rows=8, response=24, tolerance=1e-4, episode=640,
    architecture=ArchitectureConfig(hidden_size=128, layers=2, heads=2, intermediate_size=384, max_positions=640))
