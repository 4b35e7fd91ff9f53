"""The whole configuration of each stage, and the checks that involve more than one section."""

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rlhf_ray.config.algorithm import AlgorithmConfig, OldLogprobs, PtxConfig
from rlhf_ray.config.bundle_assignment import check_bundles
from rlhf_ray.config.combination_checks import (
    check_buffer,
    check_chunks,
    check_deadlines,
    check_phases,
    check_transport,
)
from rlhf_ray.config.data import (
    DemonstrationsConfig,
    EvaluationPrompts,
    PreferencesConfig,
    ProcessRowsConfig,
    PromptsConfig,
    StepsConfig,
)
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig, WeightsConfig
from rlhf_ray.config.learner import LearnerConfig, PolicyConfig, PPOLearnerConfig
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.config.rewards import FunctionReward, HTTPReward, ModelReward, RewardConfig, VerifiableReward
from rlhf_ray.config.run import ClusterConfig, PlacementConfig, PoolConfig, RunConfig
from rlhf_ray.config.section import Section
from rlhf_ray.config.training_loop import (
    BufferConfig,
    CheckpointConfig,
    CoordinatorConfig,
    EarlyStopConfig,
    EvaluationConfig,
    LoggingConfig,
)


def _default_pools() -> dict[str, PoolConfig]:
    return {"default": PoolConfig()}


class StageConfig(BaseSettings):
    """Sections of every stage: the run, the cluster, its pools, and logging."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="RLHF_RAY_", env_nested_delimiter="__", use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    run: RunConfig = Field(default_factory=RunConfig)
    """The run itself."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """The Ray cluster."""
    pools: dict[str, PoolConfig] = Field(default_factory=_default_pools)
    """Named sets of resource bundles; every role uses one."""
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    """Destinations of metrics and texts."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """A configuration is built from its arguments only; `load` reads the environment once, together with the
        file."""
        return (init_settings,)

    def placements(self) -> dict[str, PlacementConfig]:
        """Placements of the roles of this stage, by section."""
        return {name: v for name in type(self).model_fields if isinstance(v := getattr(self, name), PlacementConfig)}

    @model_validator(mode="after")
    def _pools_suffice(self) -> Self:
        placements = self.placements()
        for role, p in placements.items():
            if p.pool not in self.pools:
                raise ValueError(f"{role}.pool={p.pool!r} is not one of the pools {sorted(self.pools)}; use one of "
                                 "them, or define it")
            for kind in ("cpus", "gpus"):
                bundle = getattr(self.pools[p.pool], kind)
                if getattr(p, kind) > bundle:
                    raise ValueError(
                        f"{role}.{kind}={getattr(p, kind):g} is more than a bundle of pools.{p.pool} has ({bundle:g}); "
                        f"a worker runs in one bundle, so raise pools.{p.pool}.{kind} or lower {role}.{kind}"
                    )
        for name, pool in self.pools.items():
            users = {r: p for r, p in placements.items() if p.pool == name}
            for kind in ("cpus", "gpus"):
                asked = sum(p.workers * getattr(p, kind) for p in users.values())
                given = pool.bundles * getattr(pool, kind)
                if asked > given + 1e-6:
                    parts = ", ".join(f"{r} {p.workers}x{getattr(p, kind)}" for r, p in users.items())
                    raise ValueError(
                        f"pools.{name} has {given:g} {kind}, but its roles need {asked:g} ({parts}); "
                        f"raise pools.{name}.{kind} or bundles, or lower the roles' {kind} or workers"
                    )
        check_bundles(self.pools, placements)
        return self


class SupervisedTrainingConfig(Section):
    """Batches and evaluation of a supervised stage."""

    batch_size: int = Field(64, ge=1)
    """Rows (or pairs) of one update, over all ranks."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations on held-out rows; 0 evaluates only at the end."""


class SFTConfig(StageConfig):
    """`rlhf-ray sft`: supervised fine-tuning on demonstrations, on packed sequences."""

    model: ModelConfig | NewModelConfig
    """Model to start from: a `path`, or an `architecture` and `tokenizer` to make one."""
    data: DemonstrationsConfig
    """Demonstrations."""
    training: SupervisedTrainingConfig = Field(default_factory=SupervisedTrainingConfig)
    """Batches and evaluation."""
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    """The model under training."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When to save."""


class RewardModelTrainingConfig(SupervisedTrainingConfig):
    """Loss, batches and evaluation of the reward model."""

    batch_size: int = Field(32, ge=1)
    """Pairs of one update, over all ranks."""
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """Pairwise loss: -log sigmoid(difference) (Stiennon et al. 2020), or log(1 + exp(-difference)) (Bai et al. 2022),
    which are the same function. Both use `data.margin`."""


class RewardModelConfig(StageConfig):
    """`rlhf-ray reward-model`: a scalar head trained on preference pairs (Stiennon et al. 2020)."""

    model: ModelConfig
    """Model to start from, usually the SFT model; a scalar head is added."""
    data: PreferencesConfig
    """Preference pairs."""
    training: RewardModelTrainingConfig = Field(default_factory=RewardModelTrainingConfig)
    """Loss, batches and evaluation."""
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    """The model under training."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When to save."""


class ProcessRewardConfig(StageConfig):
    """`rlhf-ray process-reward`: a language model that judges each step of a solution (Lightman et al. 2023)."""

    model: ModelConfig | NewModelConfig
    """Model to start from: a `path`, or an `architecture` and `tokenizer` to make one."""
    data: ProcessRowsConfig
    """Solutions whose steps are labelled."""
    steps: StepsConfig
    """Tokens at which steps are judged, and the tokens predicted there."""
    training: SupervisedTrainingConfig = Field(default_factory=SupervisedTrainingConfig)
    """Batches and evaluation."""
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    """The model under training."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When to save."""


class SamplePairsConfig(Section):
    """Pairs of samples from one model, ranked by a judge."""

    judge: Literal["vader"] = "vader"
    """Judge that ranks the two samples of a pair."""
    min_margin: float = Field(0.1, ge=0)
    """Pairs whose scores differ by less are left out (and counted)."""
    output: str = Field("preferences.jsonl", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    """File to write, relative to run.dir."""


class PreferencesStageConfig(StageConfig):
    """`rlhf-ray preferences`: sample pairs of responses from a model and rank each pair by a judge."""

    model: ModelConfig
    """Model to sample from."""
    prompts: PromptsConfig
    """Prompts to respond to, one pair each."""
    generator: GenerationConfig = Field(default_factory=GenerationConfig)
    """vLLM workers."""
    pairs: SamplePairsConfig = Field(default_factory=SamplePairsConfig)
    """How pairs are ranked."""

    @model_validator(mode="after")
    def _all_prompts(self) -> Self:
        if self.prompts.held_out:
            raise ValueError(f"prompts.held_out={self.prompts.held_out:g} holds out prompts for an evaluation, but "
                             "this stage has none; set it to 0, and use data.held_out of `reward-model` to hold out "
                             "pairs")
        return self


class CriticConfig(PPOLearnerConfig):
    """The critic under training."""

    backbone: Literal["own", "policy"] = "own"
    """A separate model, or a value head on the policy. With "policy", one model is trained with the settings of
    `policy` on both losses (`algorithm.value_coef`), no critic is started, and the rest of this section has no
    effect."""
    init: Literal["policy", "reward"] = "policy"
    """Start from the policy's weights with a new head, or from the reward model (the only one of `rewards`) with its
    head. With the latter, values leak the reward while λ < 1; the default avoids that."""


class PPOConfig(StageConfig):
    """`rlhf-ray ppo`: proximal policy optimisation for rewards, with a reference KL."""

    model: ModelConfig
    """Policy to start from, and the frozen reference."""
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    """Named reward components, whose weighted sum is the score."""
    prompts: PromptsConfig
    """Prompts that rollouts start from."""
    generator: GenerationConfig = Field(default_factory=GenerationConfig)
    """vLLM rollout workers."""
    reference: "ScorerConfig" = Field(default_factory=lambda: ScorerConfig())
    """Frozen reference model; not started with `policy.lora`, whose frozen base is the reference."""
    reward: "RewardScorerConfig" = Field(default_factory=lambda: RewardScorerConfig())
    """Workers that compute the rewards."""
    assembler: PlacementConfig = Field(default_factory=lambda: PlacementConfig(cpus=0.05))
    """Turns rollouts and scores into experience."""
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    """The policy under training."""
    critic: CriticConfig = Field(default_factory=CriticConfig)
    """The critic under training; not started if `algorithm.estimator` uses none."""
    ptx: PtxConfig | None = None
    """Pretraining text mixed into the policy's update (PPO-ptx); off if empty."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Estimator, losses and their hyperparameters."""
    coordinator: CoordinatorConfig = Field(default_factory=CoordinatorConfig)
    """Batch size, staleness and concurrency."""
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    """Replay buffer."""
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    """How new weights are sent to the generators."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When to save."""
    evaluation: EvaluationConfig | None = None
    """Held-out evaluation; off if empty."""
    early_stop: EarlyStopConfig = Field(default_factory=EarlyStopConfig)
    """When to end a run that went wrong."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one update."""
        return self.coordinator.prompts_per_step * self.coordinator.samples_per_prompt

    @property
    def concurrency(self) -> int:
        """Maximum number of samples in flight at the generators."""
        return self.concurrency_of(self.generator.workers)

    def concurrency_of(self, generators: int) -> int:
        """The same for a number of generators, which may change during a run."""
        return self.coordinator.concurrency or generators * self.generator.samples_in_flight

    @property
    def buffer_capacity_mb(self) -> int | None:
        """Maximum MiB of experience held; None without a bound."""
        half_a_store = None if self.cluster.address else self.cluster.object_store_mb // 2
        return self.buffer.capacity_mb or half_a_store

    @property
    def longest_response(self) -> tuple[int, str]:
        """Maximum tokens of a response, in training or evaluation, and the field that sets it."""
        fields = {"generator.sampling.max_tokens": self.generator.sampling.max_tokens}
        if self.evaluation and self.evaluation.sampling:
            fields["evaluation.sampling.max_tokens"] = self.evaluation.sampling.max_tokens
        field = max(fields, key=fields.__getitem__)
        return fields[field], field

    @property
    def solved_at(self) -> dict[str, float]:
        """Minimum score at which a component of the rewards counts as solved, by name; pass@k is reported for these
        only."""
        scores = {name: reward.right for name, reward in self.rewards.items()
                  if isinstance(reward, VerifiableReward) and reward.right > reward.wrong}
        other = self.evaluation.solved_at if self.evaluation else None
        if other is not None:
            scores |= {name: other for name, reward in self.rewards.items()
                       if isinstance(reward, FunctionReward | HTTPReward)}
        return scores

    @property
    def evaluates_the_policy_itself(self) -> bool:
        """Whether held-out responses are sampled from the distribution under training, so that the generators'
        log-probabilities minus the reference's estimate a KL. Truncated, greedy or other temperatures do not."""
        training, other = self.generator.sampling, self.evaluation.sampling if self.evaluation else None
        return other is None or (other.temperature == training.temperature and other.top_p == 1 and not other.top_k)

    @property
    def evaluation_prompts(self) -> PromptsConfig | None:
        """The section of `evaluation.prompts`, with missing fields taken from the training prompts; None if it names no
        data set."""
        if self.evaluation is None or self.evaluation.prompts is None:
            return None
        return EvaluationPrompts(**dict(self.prompts) | {
            "path": self.evaluation.prompts, "mix": [], "subset": None, "split": self.evaluation.split,
            "column": self.evaluation.column, "limit": self.evaluation.limit, "held_out": 0.0,
        })

    @property
    def critic_model(self) -> ModelConfig:
        """Model that the critic starts from."""
        return self._reward_models[0] if self.critic.init == "reward" else self.model

    @property
    def _reward_models(self) -> list[ModelReward]:
        return [reward for reward in self.rewards.values() if isinstance(reward, ModelReward)]

    def placements(self) -> dict[str, PlacementConfig]:
        """Placements of the roles that are started: the critic only if it is a separate model, the reference only if it
        is not the policy's frozen base."""
        absent = {"critic": not self.starts_critic, "reference": not self.starts_reference}
        return {name: p for name, p in super().placements().items() if not absent.get(name)}

    @property
    def starts_reference(self) -> bool:
        """Whether the reference has its own workers; a policy with adapters contains it as its frozen base."""
        return self.policy.lora is None

    @property
    def shares_backbone(self) -> bool:
        """Whether policy and critic are one model."""
        return self.algorithm.has_critic and self.critic.backbone == "policy"

    @property
    def old_logprobs(self) -> OldLogprobs:
        """Source of the old log-probabilities: `algorithm.old_logprobs`, or "update" if the update's own forward pass
        gives them, so that no separate pass is needed.

        That requires a single optimizer step per batch, on-policy samples, and no dropout. Rewards and the adaptive
        coefficient must not need them before the update; metrics use the generators'.
        """
        if self.algorithm.old_logprobs == "generator":
            return "generator"
        return "update" if self._trains_on_own_forward else "policy"

    @property
    def _trains_on_own_forward(self) -> bool:
        a, lora = self.algorithm, self.policy.lora
        only_one = a.epochs * a.mini_batches == 1 and not self.coordinator.max_staleness and not self.shares_backbone
        needed_before = a.kl.kind == "adaptive" or not (a.kl_in_loss or a.kl.coef == 0) or a.critic_warmup_steps > 0
        return only_one and not needed_before and not (lora and lora.dropout)

    @property
    def starts_critic(self) -> bool:
        """Whether the critic is a separate model, and so a role."""
        return self.algorithm.has_critic and self.critic.backbone == "own"

    @model_validator(mode="before")
    @classmethod
    def _evaluation_samples_as_training(cls, given: Any) -> Any:
        """Fill in missing fields of `evaluation.sampling`, so that the saved configuration contains them."""
        evaluation, generator = _given(given, "evaluation"), _given(given, "generator")
        sampling, training = _given(evaluation, "sampling"), _given(generator, "sampling")
        if not sampling or not training:
            return given
        return {**given, "evaluation": {**evaluation, "sampling": {**training, **sampling}}}

    @model_validator(mode="after")
    def _one_backbone(self) -> Self:
        if self.critic.backbone == "policy" and not self.algorithm.has_critic:
            raise ValueError(f"critic.backbone=policy makes the policy its own critic, but algorithm.estimator="
                             f"{self.algorithm.estimator} uses none; set backbone to own, or the estimator to gae")
        if not self.shares_backbone:
            return self
        if self.algorithm.old_logprobs == "generator":
            raise ValueError("algorithm.old_logprobs=generator saves a forward pass of the policy, but "
                             "critic.backbone=policy needs that pass for the values; set it to policy")
        if self.critic.init == "reward":
            raise ValueError("critic.init=reward starts a separate critic from the reward model, but with "
                             "critic.backbone=policy the critic is the policy's model; set init to policy")
        if self.algorithm.critic_warmup_steps:
            raise ValueError(f"algorithm.critic_warmup_steps={self.algorithm.critic_warmup_steps} trains only "
                             "the critic, but with critic.backbone=policy that would also change the policy; set it "
                             "to 0")
        return self

    @model_validator(mode="after")
    def _reward_names_and_weights(self) -> Self:
        for name in self.rewards:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(f"rewards: {name!r} is not a valid name of a component (it becomes part of metric "
                                 "names); use letters, digits, _ and -")
        if not any(reward.weight for reward in self.rewards.values()):
            raise ValueError(f"rewards: the weight of each of {', '.join(self.rewards)} is 0, so every response would "
                             "score 0; give one of them another weight")
        return self

    @model_validator(mode="after")
    def _critic_start(self) -> Self:
        models = self._reward_models
        if self.starts_critic and self.critic.init == "reward" and len(models) != 1:
            raise ValueError(f"critic.init=reward starts the critic from the only reward of type model, but "
                             f"rewards has {len(models) or 'none'}; use critic.init=policy, or one such reward")
        return self

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.algorithm.compares_groups and self.coordinator.samples_per_prompt < 2:
            raise ValueError(
                f"algorithm.estimator={self.algorithm.estimator} compares a prompt's samples, but "
                f"coordinator.samples_per_prompt={self.coordinator.samples_per_prompt}; raise it to at least 2 (4 to "
                "16 are usual) or use gae, reinforce or reinforce_pp"
            )
        return self

    @model_validator(mode="after")
    def _held_out(self) -> Self:
        if self.evaluation and self.evaluation.prompts is None and not self.prompts.held_out:
            raise ValueError("evaluation.prompts is empty and prompts.held_out=0, so the evaluation has no prompts; "
                             "set evaluation.prompts, or prompts.held_out (0.01 to 0.1 are usual)")
        if self.prompts.held_out and (self.evaluation is None or self.evaluation.prompts is not None):
            fix = ("add one, e.g. evaluation.every=10" if self.evaluation is None else
                   f"it uses evaluation.prompts={self.evaluation.prompts!r}; leave that empty")
            raise ValueError(f"prompts.held_out={self.prompts.held_out:g} holds out prompts for an "
                             f"evaluation that does not use them: {fix}, or set prompts.held_out=0")
        return self

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        buffer, longest = self.algorithm.overlong_buffer, self.generator.sampling.max_tokens
        if buffer is not None and buffer > longest:
            raise ValueError(f"algorithm.overlong_buffer={buffer} is more than the maximum response length, "
                             f"generator.sampling.max_tokens={longest}; lower it to a part of that")
        return self

    @model_validator(mode="after")
    def _best(self) -> Self:
        metric = self.checkpoint.best_metric
        if metric and not self.evaluation:
            raise ValueError(f"checkpoint.best_metric={metric} is measured on held-out prompts, but there is no "
                             "evaluation; add one, e.g. evaluation.every=10, with prompts.held_out=0.01 or "
                             "evaluation.prompts")
        if metric == "kl" and not self.evaluates_the_policy_itself:
            raise ValueError("checkpoint.best_metric=kl, but KL is only measured if evaluation.sampling is the "
                             "distribution under training (its temperature, top_p=1, top_k=0); change one of them")
        return self

    @model_validator(mode="after")
    def _geometry(self) -> Self:
        c, samples = self.coordinator, self.samples_per_step
        if samples % self.algorithm.mini_batches:
            raise ValueError(
                f"coordinator.prompts_per_step x samples_per_prompt = {c.prompts_per_step} x {c.samples_per_prompt} = "
                f"{samples} is not divisible by algorithm.mini_batches={self.algorithm.mini_batches}; "
                "change one of them"
            )
        check_chunks(c, samples, self.generator.chunk, self.concurrency)
        check_buffer(self.buffer, samples, c.max_staleness,
                     self.prompts.max_tokens + self.generator.sampling.max_tokens, self.buffer_capacity_mb,
                     self.algorithm.has_critic)
        check_deadlines(self.buffer, self.cluster)
        return self

    @model_validator(mode="after")
    def _micro_batches(self) -> Self:
        learners = ("policy", "critic") if self.starts_critic else ("policy",)
        for role in (*learners, *(["reference"] if self.starts_reference else []), "reward"):
            budget, (response, field) = getattr(self, role).micro_batch_tokens, self.longest_response
            if role in learners and (role != "policy" or self.starts_reference):  # these process no held-out responses
                response, field = self.generator.sampling.max_tokens, "generator.sampling.max_tokens"
            if budget < self.prompts.max_tokens + response:
                raise ValueError(
                    f"{role}.micro_batch_tokens={budget} is less than the longest sample, prompts.max_tokens + {field} "
                    f"= {self.prompts.max_tokens + response}; raise it to at least that"
                )
        if self.ptx and self.policy.micro_batch_tokens < self.ptx.max_tokens:
            raise ValueError(f"policy.micro_batch_tokens={self.policy.micro_batch_tokens} is less than "
                             f"ptx.max_tokens={self.ptx.max_tokens}; raise it to at least that, or lower "
                             "ptx.max_tokens")
        rows = self.samples_per_step // self.algorithm.mini_batches
        for role in learners:
            workers = getattr(self, role).workers
            if rows < workers:
                raise ValueError(
                    f"a mini-batch of {rows} samples cannot be divided among {role}.workers={workers}; "
                    "use fewer mini_batches or workers"
                )
        return self

    @model_validator(mode="after")
    def _accelerators(self) -> Self:
        check_transport(self.weights.transport, self.generator, self.policy, self.pools)
        learners = {"policy": self.policy} | ({"critic": self.critic} if self.starts_critic else {})
        check_phases(self.generator, learners, self.coordinator.max_staleness)
        return self

    @model_validator(mode="after")
    def _schedules(self) -> Self:
        a = self.algorithm
        if a.critic_warmup_steps >= self.run.steps:
            raise ValueError(
                f"algorithm.critic_warmup_steps={a.critic_warmup_steps} leaves no step of run.steps={self.run.steps} "
                "for the policy; lower it or raise run.steps"
            )
        if a.kl.kind == "adaptive" and self.samples_per_step >= 5 * a.kl.horizon:
            raise ValueError(
                f"algorithm.kl.horizon={a.kl.horizon} is less than a fifth of the {self.samples_per_step} samples of "
                "a step, and one correction could turn the coefficient negative; use 10000 or more"
            )
        return self


def _given(section: Any, key: str) -> dict[str, Any]:
    """The keys that were set in a section, given as a mapping or as a Section."""
    value = section.get(key) if isinstance(section, dict) else None
    if isinstance(value, Section):
        return {name: getattr(value, name) for name in value.model_fields_set}
    return value if isinstance(value, dict) else {}


class ScorerConfig(PlacementConfig):
    """A frozen model that scores rollouts."""

    micro_batch_tokens: int = Field(8192, ge=8)
    """Maximum number of tokens in one forward pass."""


class RewardScorerConfig(ScorerConfig):
    """The workers that compute the rewards, and the handling of samples that cannot be scored."""

    on_failure: Literal["fail", "quarantine"] = "fail"
    """If a sample cannot be scored: "fail" ends the run; "quarantine" replaces its prompt by another one and lists it
    in quarantine.jsonl. A reward source that fails as a whole ends the run in both cases."""
    quarantine_limit: float = Field(0.01, gt=0, le=1)
    """Maximum share of prompts in quarantine (at least one is allowed). If more than 1 in 100 cannot be scored, the
    reward is more likely to be broken than the prompts, and the remaining data is a biased selection."""


PPOConfig.model_rebuild()
__all__ = ["PPOConfig", "PreferencesStageConfig", "ProcessRewardConfig", "RewardModelConfig", "SFTConfig",
           "RewardScorerConfig", "ScorerConfig", "StageConfig", "SamplingConfig"]
