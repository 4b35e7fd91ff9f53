"""Rollouts: sampling, the engine that samples, and how its weights arrive."""

from typing import Literal

from pydantic import Field, model_validator

from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.section import Section

CACHE_ON_CPU_MB = 64
"""MiB of KV cache where `generator.kv_cache_mb` is empty on a CPU: enough for small models. vLLM itself would take most
of the node's memory."""
PREFILL_ON_CPU, PREFILL_ON_GPU = 2048, 8192
"""Tokens of one pass of vLLM (`max_num_batched_tokens`): what an engine made from arguments gets where they leave it
open, which is little for a GPU, and the default of vLLM's server on GPUs of 70 GB and more."""


class SamplingConfig(Section):
    """How responses are drawn. Log-probabilities refer to the distribution after temperature."""

    max_tokens: int = Field(256, ge=1)
    """Longest response, in tokens."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature; 0 is greedy (evaluation only). PPO's default is 1 (Ziegler et al. 2019 used 0.7)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 keeps the whole distribution. PPO needs 1 in `generator.sampling`, so that
    log-probabilities are those of the policy."""
    top_k: int = Field(0, ge=0)
    """Sample among the k likeliest tokens; 0 keeps them all. PPO needs 0."""


class GenerationConfig(PlacementConfig):
    """vLLM rollout workers."""

    engine: Literal["auto", "in_process", "async"] = "auto"
    """"in_process" steps vLLM in the worker (smallest on CPU); "async" runs AsyncLLM; "auto" takes async on a GPU."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling of training rollouts."""
    chunk: int = Field(16, ge=1)
    """Samples per rollout record: the unit that is generated, scored and stored together."""
    max_sequences: int = Field(64, ge=1)
    """Sequences a worker decodes at the same time (vLLM's max_num_seqs)."""
    kv_cache_mb: int | None = Field(None, ge=8)
    """KV-cache memory of a worker in MiB; empty is 64 on CPUs, and on GPUs what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of GPU memory for vLLM when `kv_cache_mb` is empty."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs (on CPUs processes) that share each layer of a worker's model (async engine)."""
    pipeline_parallel: int = Field(1, ge=1)
    """GPUs that share a worker's layers out in stages (async engine); where a model is over the GPUs of one
    `tensor_parallel` group, which is faster as long as it lies on one node's links."""
    sleep_level: int = Field(0, ge=0, le=2)
    """What generators give up while the learners learn, to share a GPU with them: nothing (0), the cache and, to main
    memory, the weights (1), or both for good (2): a publication brings the weights whole. vLLM's levels; GPUs only."""

    @property
    def devices(self) -> int:
        """GPUs of one worker; on CPUs its processes."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def cache_mb(self) -> int | None:
        """`kv_cache_mb`, with what empty means on a CPU; None leaves the size to vLLM."""
        return self.kv_cache_mb or (None if self.gpus else CACHE_ON_CPU_MB)

    @property
    def samples_in_flight(self) -> int:
        """Samples sent to one worker at a time by default: twice what it decodes side by side, and at least two
        chunks, so that it never waits for the next one."""
        return 2 * max(self.max_sequences, self.chunk)

    def prefill_tokens(self, context: int) -> int:
        """Tokens of one pass of vLLM: room for one of every sequence, and no more than all sequences have when each is
        `context` tokens long."""
        usual = PREFILL_ON_GPU if self.gpus else PREFILL_ON_CPU
        return min(max(usual, self.max_sequences), self.max_sequences * context)

    @model_validator(mode="after")
    def _full_distribution(self) -> "GenerationConfig":
        s = self.sampling
        if s.top_p < 1 or s.top_k:
            raise ValueError(
                "sampling.top_p < 1 or top_k > 0 makes behaviour log-probabilities differ from the policy's, and the "
                "PPO ratio wrong; set top_p=1 and top_k=0 (temperature may differ from 1)"
            )
        if s.temperature == 0:
            raise ValueError("sampling.temperature=0 explores nothing; use a positive temperature for training")
        return self

    @model_validator(mode="after")
    def _parallel(self) -> "GenerationConfig":
        shape = f"tensor_parallel={self.tensor_parallel} x pipeline_parallel={self.pipeline_parallel}"
        if self.devices > 1 and self.engine == "in_process":
            raise ValueError(f"{shape} is several processes a worker and needs engine: async (or auto)")
        if self.pipeline_parallel > 1 and not self.gpus:
            raise ValueError(f"pipeline_parallel={self.pipeline_parallel} needs GPUs, and generator.gpus=0 (vLLM's CPU "
                             f"build has no stages); set gpus to {self.devices}, or pipeline_parallel to 1")
        if self.devices > 1 and self.gpus not in (0, self.devices):
            raise ValueError(f"{shape} needs {self.devices} whole gpus a worker, not {self.gpus:g}; set gpus to "
                             f"{self.devices} (in one bundle: a worker lives on one node), or both to 1")
        return self

    @model_validator(mode="after")
    def _sleeps_on_gpus(self) -> "GenerationConfig":
        if self.sleep_level and not self.gpus:
            raise ValueError(f"sleep_level={self.sleep_level} frees a GPU's memory, and generator.gpus=0 uses none; "
                             "leave it at 0 on CPUs")
        if self.sleep_level and self.engine == "in_process":
            raise ValueError(f"sleep_level={self.sleep_level} needs engine: async (or auto), which can be put to sleep")
        return self


class WeightsConfig(Section):
    """How new policy weights reach the generators."""

    transport: Literal["auto", "object_store", "nccl", "ipc"] = "object_store"
    """How buckets travel: through Ray's object store on any hardware; by NCCL's broadcast from GPU to GPUs; by CUDA's
    inter-process handles on one GPU that policy and generators share. "auto" takes ipc or nccl where they can work.
    What each needs and costs is in docs/gpu.md."""
    bucket_mb: int = Field(64, ge=1)
    """Largest bucket, in MiB; a tensor larger than this gets a bucket of its own. While one is loaded the next is
    gathered, and each costs some calls: measured in docs/benchmarks.md."""
    in_flight: Literal["keep", "abort"] = "keep"
    """Responses that new weights meet: kept, and continued token by token; or aborted, and continued by a new request
    whose prompt includes what they had (frees a GPU's key-value memory for the update). Tokens carry versions in
    either case."""
    logprob_gap_alarm: float = Field(0.1, gt=0)
    """Warn when generator and learner of the same version differ by more than this mean absolute log-probability."""
