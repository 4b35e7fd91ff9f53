"""Rollouts: sampling, the generation engine, and the transport of its weights."""

from typing import Any, Literal, Self

import yaml
from pydantic import Field, JsonValue, field_validator, model_validator

from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.section import Section

CACHE_ON_CPU_MB = 64
"""MiB of KV cache if `generator.kv_cache_mb` is empty on a CPU: enough for small models. vLLM's own default would take
most of the node's memory."""
BUCKET_ON_CPU_MB = 64
"""MiB of a publication's bucket if `weights.bucket_mb` is empty, on CPUs."""
BUCKET_FROM_GPU_MB = 256
"""The same from GPUs through the object store."""
BUCKET_BETWEEN_GPUS_MB = 1024
"""The same from GPU to GPU."""
BUCKETS_IN_STORE = 3
"""Buckets of a publication that the object store holds at a time: one is loaded, one waits, one is gathered."""
PREFILL_ON_CPU, PREFILL_ON_GPU = 2048, 8192
"""Tokens of one vLLM pass (`max_num_batched_tokens`): the default of vLLM's engine arguments, which is small for a GPU,
and that of its server on GPUs of 70 GB and more."""
EngineArgument = Literal[
    "all2all_backend", "async_scheduling", "attention_backend", "block_size", "compilation_config",
    "cudagraph_capture_sizes", "disable_cascade_attn", "disable_custom_all_reduce", "enable_chunked_prefill",
    "enable_expert_parallel", "enable_flashinfer_autotune", "enable_prefix_caching", "enforce_eager",
    "gdn_prefill_backend", "kv_cache_dtype", "linear_backend", "long_prefill_token_threshold", "mamba_backend",
    "max_cudagraph_capture_size", "max_num_batched_tokens", "moe_backend", "num_gpu_blocks_override",
    "optimization_level", "performance_mode", "stream_interval",
]
"""Engine arguments of vLLM that may be set by name. They change speed and memory, and what is sampled by rounding only.
Others have a field here, or would make log-probabilities or publications wrong."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower positive temperatures to this (`_MAX_TEMP` in vllm/sampling_params.py)."""
MOST_STOP_TOKENS = 120
"""vLLM's model runner for GPUs takes 128 in all (`MAX_NUM_STOP_TOKEN_IDS` in vllm/v1/worker/gpu/sample/logit_bias.py),
and ends with an error in the middle of a step if a request has more."""


class SamplingConfig(Section):
    """How responses are sampled, with vLLM's names and defaults that change nothing. Log-probabilities are those of the
    distribution that tokens are sampled from."""

    max_tokens: int = Field(256, ge=1)
    """Longest response, in tokens."""
    min_tokens: int = Field(0, ge=0)
    """Tokens before a response may end: until then its stop tokens have probability 0, and stop strings do not end
    it."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Softmax temperature; 0 is greedy (not in training). PPO's default is 1 (Ziegler et al. 2019 used 0.7)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (Holtzman et al. 2020): sample among the fewest tokens with this probability together; 1 keeps
    all. In training only with `top_k`."""
    top_k: int = Field(0, ge=0)
    """Sample among the k most likely tokens (Fan et al. 2018), and those as likely as the last of them; 0 keeps all. In
    training each token's k tokens are recorded, 4 bytes each."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample among the tokens with at least this part of the probability of the most likely one (Nguyen et al. 2024); 0
    keeps all. In training only with `top_k`."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides positive logits, and multiplies negative ones, of tokens that are in the prompt or the response so far
    (Keskar et al. 2019); 1 changes nothing. Not in training."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response as soon as one is complete in it, decoded without special tokens; the token that
    completes it is part of the response."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a response, in addition to those of the tokenizer and the model."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower it")
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature={self.temperature:g} would become {LOWEST_TEMPERATURE} in vLLM; use 0 "
                             f"(greedy), or at least {LOWEST_TEMPERATURE}")
        if "" in self.stop:
            raise ValueError(f"stop={self.stop} contains an empty text, which is complete before the first "
                             "token; remove it")
        if self.min_tokens and len(self.stop_token_ids) > MOST_STOP_TOKENS:
            raise ValueError(f"stop_token_ids has {len(self.stop_token_ids)} tokens; with min_tokens vLLM excludes at "
                             f"most {MOST_STOP_TOKENS} besides the model's own on GPUs; remove some, or set "
                             "min_tokens to 0")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids={self.stop_token_ids} contains a negative number; tokens are "
                             "numbered from 0")
        return self

    @property
    def kind(self) -> str:
        """In words, what one batch of training responses has in common: the temperature, at which learners compute, and
        the kind of sampling mask (see `records.SampleRows.mask_sizes`)."""
        among = "all tokens, stop tokens later" if self.min_tokens else "all tokens"
        among = "the top_k tokens" if self.top_k else among
        return f"temperature={self.temperature:g} among {among}"

    def same_distribution(self, other: "SamplingConfig") -> bool:
        """Whether tokens are sampled from the same distributions, given the same tokens before them."""
        names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens"]
        if self.min_tokens:
            names.append("stop_token_ids")  # which have no probability at first
        return all(getattr(self, name) == getattr(other, name) for name in names)


class GenerationConfig(PlacementConfig):
    """vLLM rollout workers."""

    engine: Literal["auto", "in_process", "async"] = "auto"
    """"in_process" runs vLLM in the worker process (smallest on CPU); "async" runs AsyncLLM; "auto" is async on a
    GPU."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling of training rollouts."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that each worker reserves in its pool: as many as `tensor_parallel` x `pipeline_parallel`, or a fraction of
    one."""
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
    vllm: dict[EngineArgument, JsonValue] = Field(default_factory=dict)
    """Engine arguments passed on to vLLM (`vllm.AsyncEngineArgs`), by name: those that change speed and memory only."""
    sleep_level: int = Field(0, ge=0, le=2)
    """vLLM's sleep level during updates, to share a GPU with learners: 0 keeps everything; 1 frees the cache and
    offloads the weights to main memory; 2 frees both, and the next publication sends all weights. GPUs only."""

    @property
    def devices(self) -> int:
        """GPUs of one worker; on CPUs its processes."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def engine_kind(self) -> Literal["in_process", "async"]:
        """`engine`, where "auto" is async on GPUs and with several processes, and in_process otherwise."""
        if self.engine != "auto":
            return self.engine
        return "async" if self.gpus > 0 or self.devices > 1 else "in_process"

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
        """Tokens of one vLLM pass: `vllm.max_num_batched_tokens`; if it is not set, at least one per sequence, on CPUs
        at least a whole sequence, and at most those of all sequences at `context` tokens each."""
        if (given := self.vllm.get("max_num_batched_tokens")) is not None:
            return int(str(given))
        usual = PREFILL_ON_GPU if self.gpus else max(PREFILL_ON_CPU, context)
        return min(max(usual, self.max_sequences), self.max_sequences * context)

    @field_validator("vllm", mode="before")
    @classmethod
    def _values_of_texts(cls, given: Any) -> Any:
        """On a command line and in the environment, values are texts: "2048" and "false" are a number and no."""
        if not isinstance(given, dict):
            return given
        try:
            return {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in given.items()}
        except yaml.YAMLError:
            raise ValueError(f"vllm={given} has a value that cannot be read; write numbers, true, false or words"
                             ) from None

    @model_validator(mode="after")
    def _arguments_fit(self) -> "GenerationConfig":
        for name, value in self.vllm.items():
            if value is None:
                raise ValueError(f"vllm.{name} is empty; give it a value, or remove it")
        tokens = self.vllm.get("max_num_batched_tokens", self.max_sequences)
        if not isinstance(tokens, int) or tokens < self.max_sequences:
            raise ValueError(f"vllm.max_num_batched_tokens={tokens} must be a number of tokens, at least "
                             f"max_sequences={self.max_sequences}; raise it, or lower max_sequences")
        for name in ("enable_chunked_prefill", "long_prefill_token_threshold"):
            if self.vllm.get(name) and not self.gpus:
                raise ValueError(f"vllm.{name}={self.vllm[name]} divides requests over passes, and on CPUs vLLM fails "
                                 "when one with a seed is divided; remove it")
        if self.vllm.get("async_scheduling") and self.engine_kind == "in_process":
            raise ValueError("vllm.async_scheduling=true needs engine=async: in the in_process engine weights change "
                             "between two steps, which must not overlap; remove it, or set engine to async")
        return self

    @model_validator(mode="after")
    def _parallel(self) -> "GenerationConfig":
        shape = f"tensor_parallel={self.tensor_parallel} x pipeline_parallel={self.pipeline_parallel}"
        if self.devices > 1 and self.engine == "in_process":
            raise ValueError(f"{shape} runs several processes per worker and needs engine=async (or auto)")
        if self.pipeline_parallel > 1 and not self.gpus:
            raise ValueError(f"pipeline_parallel={self.pipeline_parallel} needs GPUs, but generator.gpus=0 (vLLM's CPU "
                             f"build has no pipeline stages); set gpus to {self.devices}, or pipeline_parallel to 1")
        if max(self.devices, self.gpus) > 1 and self.gpus not in (0, self.devices):
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
    bucket_mb: int | None = Field(None, ge=1)
    """Maximum size of a bucket in MiB; a larger tensor gets its own bucket. One bucket is loaded while the next is
    gathered, and each costs several calls (measured in docs/benchmark_notes.md). Empty: 64 on CPUs; between GPUs 1024
    over nccl and ipc, and 256 over the object store, less if a local cluster's store does not hold three of them."""
    in_flight: Literal["keep", "abort"] = "keep"
    """Responses in flight when new weights arrive: "keep" continues them; "abort" ends them, and continues them by a
    new request whose prompt includes the tokens so far (this frees a GPU's KV cache for the update). Each token carries
    its weight version in both cases."""
    logprob_gap_alarm: float = Field(0.5, gt=0)
    """Warn when log-probabilities of generator and learner of the same version differ by more than this at one token of
    a hundred (the 99 % quantile), in nats."""

    @property
    def bucket_bytes(self) -> int:
        """`bucket_mb` in bytes. It is filled in when a configuration is resolved; before that, the size for CPUs."""
        return (self.bucket_mb or BUCKET_ON_CPU_MB) << 20
