"""Rollouts: sampling, the generation engine, and the transport of its weights."""

from typing import Literal

from pydantic import Field, model_validator

from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.section import Section

CACHE_ON_CPU_MB = 64
"""MiB of KV cache if `generator.kv_cache_mb` is empty on a CPU: enough for small models. vLLM's own default would take
most of the node's memory."""
PREFILL_ON_CPU, PREFILL_ON_GPU = 2048, 8192
"""Tokens of one vLLM pass (`max_num_batched_tokens`): the default of vLLM's engine arguments, which is small for a GPU,
and that of its server on GPUs of 70 GB and more."""


class SamplingConfig(Section):
    """How responses are sampled. Log-probabilities refer to the distribution after temperature."""

    max_tokens: int = Field(256, ge=1)
    """Longest response, in tokens."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature; 0 is greedy (evaluation only). PPO's default is 1 (Ziegler et al. 2019 used 0.7)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 keeps the whole distribution. PPO needs 1 in `generator.sampling`, so that
    log-probabilities are those of the policy."""
    top_k: int = Field(0, ge=0)
    """Sample among the k most likely tokens; 0 keeps all. PPO needs 0."""


class GenerationConfig(PlacementConfig):
    """vLLM rollout workers."""

    engine: Literal["auto", "in_process", "async"] = "auto"
    """"in_process" runs vLLM in the worker process (smallest on CPU); "async" runs AsyncLLM; "auto" is async on a
    GPU."""
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
    """GPUs (on CPUs, processes) that share each layer of a worker's model (async engine)."""
    pipeline_parallel: int = Field(1, ge=1)
    """Stages into which a worker's layers are divided, one GPU group each (async engine), for models too large for one
    `tensor_parallel` group, which is faster within a node."""
    sleep_level: int = Field(0, ge=0, le=2)
    """vLLM's sleep level during updates, to share a GPU with learners: 0 keeps everything; 1 frees the cache and
    offloads the weights to main memory; 2 frees both, and the next publication sends all weights. GPUs only."""

    @property
    def devices(self) -> int:
        """GPUs of one worker; on CPUs its processes."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def cache_mb(self) -> int | None:
        """`kv_cache_mb`, with the default for CPUs if empty; None leaves the size to vLLM."""
        return self.kv_cache_mb or (None if self.gpus else CACHE_ON_CPU_MB)

    @property
    def samples_in_flight(self) -> int:
        """Samples sent to one worker at a time by default: twice what it decodes side by side, and at least two
        chunks, so that it never waits for the next one."""
        return 2 * max(self.max_sequences, self.chunk)

    def prefill_tokens(self, context: int) -> int:
        """Tokens of one vLLM pass: at least one per sequence, and at most those of all sequences at `context` tokens
        each."""
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
            raise ValueError("sampling.temperature=0 is greedy and explores nothing; use a positive temperature for "
                             "training")
        return self

    @model_validator(mode="after")
    def _parallel(self) -> "GenerationConfig":
        shape = f"tensor_parallel={self.tensor_parallel} x pipeline_parallel={self.pipeline_parallel}"
        if self.devices > 1 and self.engine == "in_process":
            raise ValueError(f"{shape} runs several processes per worker and needs engine=async (or auto)")
        if self.pipeline_parallel > 1 and not self.gpus:
            raise ValueError(f"pipeline_parallel={self.pipeline_parallel} needs GPUs, but generator.gpus=0 (vLLM's CPU "
                             f"build has no pipeline stages); set gpus to {self.devices}, or pipeline_parallel to 1")
        if self.devices > 1 and self.gpus not in (0, self.devices):
            raise ValueError(f"{shape} needs {self.devices} whole gpus per worker, not {self.gpus:g}; set gpus to "
                             f"{self.devices} (in one bundle: a worker runs on one node), or both to 1")
        return self

    @model_validator(mode="after")
    def _sleeps_on_gpus(self) -> "GenerationConfig":
        if self.sleep_level and not self.gpus:
            raise ValueError(f"sleep_level={self.sleep_level} frees GPU memory, but generator.gpus=0; "
                             "set it to 0 on CPUs")
        if self.sleep_level and self.engine == "in_process":
            raise ValueError(f"sleep_level={self.sleep_level} needs engine=async (or auto); the in_process "
                             "engine cannot sleep")
        return self


class WeightsConfig(Section):
    """How new policy weights are sent to the generators."""

    transport: Literal["auto", "object_store", "nccl", "ipc"] = "object_store"
    """Transport of weight buckets: Ray's object store (any hardware), NCCL broadcast between GPUs, or CUDA IPC handles
    on a GPU that policy and generators share. "auto" chooses ipc or nccl where possible. docs/gpu.md describes their
    requirements and cost."""
    bucket_mb: int = Field(64, ge=1)
    """Maximum size of a bucket in MiB; a larger tensor gets its own bucket. One bucket is loaded while the next is
    gathered, and each costs several calls (measured in docs/benchmarks.md)."""
    in_flight: Literal["keep", "abort"] = "keep"
    """Responses in flight when new weights arrive: "keep" continues them; "abort" ends them, and continues them by a
    new request whose prompt includes the tokens so far (this frees a GPU's KV cache for the update). Each token carries
    its weight version in both cases."""
    logprob_gap_alarm: float = Field(0.1, gt=0)
    """Warn when generator and learner of the same version differ by more than this mean absolute log-probability."""
