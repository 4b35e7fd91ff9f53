"""Learners: DeepSpeed, optimizer, schedule and memory."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.section import Section, settled

SHARDED_BUCKET = 2**24
"""Gradients per reduce bucket at ZeRO stage 3, and at least at stage 2. DeepSpeed's default of 500 million takes 2 GB
of a rank several times: as collected, as laid out by rank, and in gloo. The hidden size squared, which transformers
chooses (this value is that of an 8B Llama), is still large enough for fast messages."""
MICRO_BATCH_TOKENS = 4096
"""Tokens of a micro-batch that nobody set and that are not derived from the memory of GPUs."""


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter 2019) with a learning-rate schedule."""

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate. The policy's default is 1e-6 (OpenRLHF, verl; TRL's PPO has 3e-6), the critic's 9e-6
    (OpenRLHF; verl has 1e-5), that of SFT 2e-5 (Touvron et al. 2023, Llama 2; TRL; OpenRLHF has 5e-6), that of reward
    models 9e-6 (Ouyang et al. 2022, app. C.2; OpenRLHF; TRL has 1e-4). Process reward models have the same as reward
    models (OpenRLHF 0.8 had 1e-6). With `lora` it is ten times that (Schulman et al. 2025, "LoRA Without Regret")."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decay (0.9, 0.95 as in Llama 2 and OpenRLHF)."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's denominator offset (1e-8 in OpenRLHF)."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay on matrices; none on vectors."""
    grad_clip: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """Share of the run's optimizer steps that are warm-up, rounded up, in place of `warmup_steps` (transformers'
    field; OpenRLHF: 0.03)."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after warm-up, over the optimizer steps of the whole run."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end of decay, as a share of the peak."""
    max_consecutive_skipped_updates: int = Field(3, ge=1)
    """End the run after this many consecutive updates in which no step was applied because no loss and gradient was
    finite (3 as in Axolotl's examples of a loss watchdog)."""

    def warmup_of(self, total_steps: int) -> int:
        """Number of warm-up steps among all optimizer steps of a run."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * total_steps)

    @model_validator(mode="after")
    def _possible(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={list(self.betas)} must be at least 0 and less than 1")
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError(f"warmup_ratio={self.warmup_ratio:g} and warmup_steps={self.warmup_steps} both set the "
                             "warm-up; leave one of them out")
        return self


class LoRAConfig(Section):
    """Low-rank adapters on frozen linear layers (Hu et al. 2021): W x + alpha/rank * B A x."""

    rank: int = Field(16, ge=1)
    """Rank of A and B; 8 to 64 are usual. Setting any field of `lora`, or `lora: {}`, turns adapters on."""
    alpha: int = Field(32, ge=1)
    """The adapters' output is scaled by alpha / rank (32 as in Schulman et al. 2025, "LoRA Without Regret")."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapters' inputs in training; in PPO the first update's ratio is then not 1."""
    targets: list[str] = Field(["all-linear"], min_length=1)
    """Linear layers with adapters, by the end of their names (q_proj, layers.0.mlp.up_proj); all-linear means all
    except the output head (with fewer layers, results fall behind full training: Dettmers et al. 2023)."""

    @model_validator(mode="after")
    def _all_or_some(self) -> "LoRAConfig":
        if len(self.targets) > 1 and "all-linear" in self.targets:
            raise ValueError(f"targets={self.targets} lists layers besides all-linear, which includes them; keep one")
        return self


LORA_RATE = 10
"""Learning rate with adapters over that of full training (Schulman et al. 2025, "LoRA Without Regret")."""


def recomputed_layers(share: float, layers: int) -> int:
    """Number of layers in a share of them, to the nearest."""
    return int(share * layers + 0.5)


_SHARE = TypeAdapter(Annotated[bool | float, Field(ge=0, le=1, allow_inf_nan=False)])


def _share_of_layers(value: Any) -> bool | float:
    """True, false, or a number from 0 to 1.

    Raises:
        ValueError: it is none of these.
    """
    try:
        return _SHARE.validate_python(value)
    except ValidationError:
        raise ValueError(f"gradient_checkpointing={value!r} must be true, false, or the share of layers to recompute, "
                         "from 0 to 1") from None


class LearnerConfig(PlacementConfig):
    """A model under training on one or more data-parallel ranks (one worker each)."""

    default_rate: ClassVar[float] = 1e-5
    """Default of `optimizer.learning_rate` without adapters."""

    zero_stage: int = Field(1, ge=0, le=3)
    """DeepSpeed ZeRO stage: 0 replicates, 1 shards optimizer state, 2 gradients too, 3 parameters too."""
    offload_optimizer: bool = False
    """Keep optimizer state in CPU memory (GPU learners, ZeRO 1-3)."""
    autocast: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward passes; weights and optimizer stay in float32."""
    gradient_checkpointing: Annotated[bool | float, BeforeValidator(_share_of_layers)] = Field(False, ge=0, le=1)
    """Recompute activations in the backward pass to save memory: `true` those of all layers, a number those of this
    share of them, spread evenly. A layer that is recomputed takes a third longer."""
    compile_layers: bool | None = None
    """Compile each decoder layer with torch.compile, so that a GPU reads and writes each activation fewer times; if a
    family's layers are not one graph each, their norms and MLPs. When empty: on GPUs, except with zero_stage=3, which
    exchanges the parameters of compiled layers."""
    micro_batch_tokens: int = Field(MICRO_BATCH_TOKENS, ge=8)
    """Maximum number of tokens in one forward and backward pass of a rank; the result does not depend on it. `auto`, or
    nothing, is 4096 on CPUs, and on GPUs the largest power of two up to 32768 for which memory suffices, found before
    the run starts."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer and schedule."""
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the loss that balances the routers of a mixture of experts (Fedus et al. 2021, eq. 4; 0.001 to 0.02 in
    the config.json of Qwen and Mixtral models); each micro-batch is balanced on its own. 0 leaves the routers alone."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters on a frozen model in its own precision; if empty, train the whole model."""

    def recomputed(self, layers: int) -> int:
        """Number of layers, of so many, whose activations are recomputed."""
        return recomputed_layers(self.gradient_checkpointing, layers)

    @property
    def compiles_layers(self) -> bool:
        """Whether layers are compiled."""
        return self.gpus > 0 and self.zero_stage < 3 if self.compile_layers is None else self.compile_layers

    @property
    def drops_out(self) -> bool:
        """Whether adapters leave out some of their inputs in updates, and not in other passes."""
        return self.lora is not None and self.lora.dropout > 0

    @model_validator(mode="before")
    @classmethod
    def _auto_is_not_set(cls, given: Any) -> Any:
        """With `micro_batch_tokens: auto`, or null, the field counts as not set."""
        if isinstance(given, dict) and given.get("micro_batch_tokens", 0) in ("auto", None):
            return {name: value for name, value in given.items() if name != "micro_batch_tokens"}
        return given

    @model_validator(mode="after")
    def _rate_of_the_role(self) -> "LearnerConfig":
        """Fill in the default learning rate, which depends on the role and on `lora`; it does not count as set."""
        if "learning_rate" not in self.optimizer.model_fields_set:
            self.__dict__["optimizer"] = settled(self.optimizer, learning_rate=self.usual_rate)
        return self

    @property
    def usual_rate(self) -> float:
        """The default of `optimizer.learning_rate`."""
        return self.default_rate if self.lora is None else round(LORA_RATE * self.default_rate, 12)

    @property
    def is_sharded(self) -> bool:
        """As `PlacementConfig.is_sharded`."""
        return self.zero_stage == 3

    @model_validator(mode="after")
    def _compiled_whole(self) -> "LearnerConfig":
        if self.compile_layers and self.zero_stage == 3:
            raise ValueError("compile_layers=true compiles layers with the parameters they have, but zero_stage=3 "
                             "gathers and releases these in every pass; set compile_layers to false, or zero_stage to "
                             "2 or less")
        return self

    @model_validator(mode="after")
    def _offload(self) -> "LearnerConfig":
        if self.offload_optimizer and not (self.gpus and self.zero_stage):
            raise ValueError("offload_optimizer moves optimizer state from GPU to CPU memory and needs gpus > 0 and "
                             f"zero_stage 1 to 3; here gpus={self.gpus:g} and zero_stage={self.zero_stage}")
        return self


class SFTLearnerConfig(LearnerConfig):
    """The learner of SFT."""

    default_rate = 2e-5


class RewardLearnerConfig(LearnerConfig):
    """The learner of a reward model or a process reward model."""

    default_rate = 9e-6


class PPOLearnerConfig(LearnerConfig):
    """A learner of PPO, which is idle during rollouts."""

    offload_between_phases: bool = False
    """Keep optimizer state in CPU memory outside updates, to free memory for generators on the same GPU (with
    `generator.sleep_level`); GPU learners only."""

    @model_validator(mode="after")
    def _offload_phases(self) -> "PPOLearnerConfig":
        if self.offload_between_phases and not self.gpus:
            raise ValueError("offload_between_phases moves optimizer state to CPU memory between updates, but gpus=0; "
                             "set it to false on CPUs")
        if self.offload_between_phases and self.offload_optimizer:
            raise ValueError("offload_between_phases moves optimizer state to CPU memory between updates, but "
                             "offload_optimizer keeps it there always; set only one of them")
        return self


class PolicyConfig(PPOLearnerConfig):
    """The policy under training."""

    default_rate = 1e-6

    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights, updated with this decay after each optimizer step (Ouyang et
    al. 2022, app. C.4: 0.992, as in DeepSpeed-Chat and OpenRLHF), and export it as model_ema/; off when empty."""
