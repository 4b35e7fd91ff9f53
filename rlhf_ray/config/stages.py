"""The whole configuration of each stage: its sections, and beside those of roles the `RoleFacts`.

What follows from several sections is in `derived`, what they must have in common in `combination_checks`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlhf_ray.config.algorithm import (
    AlgorithmConfig,
    GRPOAlgorithm,
    PtxConfig,
    ReinforceAlgorithm,
    RLOOAlgorithm,
)
from rlhf_ray.config.data import (
    DemonstrationsConfig,
    PreferencesConfig,
    ProcessRowsConfig,
    PromptsConfig,
    StepsConfig,
    is_file_of_rows,
)
from rlhf_ray.config.environments import EnvironmentConfig, EpisodeRunnerConfig
from rlhf_ray.config.estimators import GROUP_ESTIMATORS
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig, WeightsConfig
from rlhf_ray.config.learner import PolicyConfig, PPOLearnerConfig, RewardLearnerConfig, SFTLearnerConfig
from rlhf_ray.config.model import ModelConfig, StartModel
from rlhf_ray.config.paths import UserPath
from rlhf_ray.config.presets import fill
from rlhf_ray.config.rewards import RewardConfig
from rlhf_ray.config.run import ClusterConfig, PlacementConfig, PoolConfig, RoleFacts, RunConfig
from rlhf_ray.config.section import Section, as_set
from rlhf_ray.config.training_loop import (
    BufferConfig,
    CheckpointConfig,
    CoordinatorConfig,
    EarlyStopConfig,
    EvaluationConfig,
    GRPOGroups,
    LoggingConfig,
    RLOOGroups,
)
from rlhf_ray.config.type_union import tag_of


def _default_pools() -> dict[str, PoolConfig]:
    return {"default": PoolConfig()}


class StageConfig(Section):
    """Sections of every stage: the run, the cluster, its pools, and logging."""

    run: RunConfig = Field(default_factory=RunConfig)
    """The run itself."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """The Ray cluster."""
    pools: dict[str, PoolConfig] = Field(default_factory=_default_pools)
    """Named sets of resource bundles; every role uses one."""
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    """Destinations of metrics and texts."""


def role_facts(stage: type[StageConfig]) -> dict[str, RoleFacts]:
    """The facts of each role that a stage may start, by its section, in the order of the sections."""
    return {section: facts for section, field in stage.model_fields.items() for facts in field.metadata
            if isinstance(facts, RoleFacts)}


_GENERATOR = RoleFacts(
    worker="generator", station="generation", phase="generate", colour="generator",
    advice="more generators (generator.workers), each on a core or GPU of its own",
)


class SupervisedTrainingConfig(Section):
    """Batches and evaluation of a supervised stage."""

    batch_size: int = Field(64, ge=1)
    """Rows (or pairs) of one update, over all ranks."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations on held-out rows; 0 evaluates only at the end."""


class SFTConfig(StageConfig):
    """`rlhf-ray sft`: supervised fine-tuning on demonstrations, on packed sequences."""

    model: StartModel
    """Model to start from: a `path`, or an `architecture` and `tokenizer` to make one."""
    data: DemonstrationsConfig
    """Demonstrations."""
    training: SupervisedTrainingConfig = Field(default_factory=SupervisedTrainingConfig)
    """Batches and evaluation."""
    learner: Annotated[SFTLearnerConfig, RoleFacts(
        worker="sft_learner", station="learning", writes=True,
    )] = Field(default_factory=SFTLearnerConfig)
    """The model under training."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When to save."""


class RewardModelTrainingConfig(SupervisedTrainingConfig):
    """Batches and evaluation of the reward model, and its dropout. The loss is -log sigmoid(difference - margin), the
    margin from `data.margin`."""

    batch_size: int = Field(32, ge=1)
    """Pairs of one update, over all ranks."""
    head_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the hidden states before the scalar head, in training only (Srivastava et al. 2014); held-out pairs
    are scored without it."""
    new_head: bool = False
    """Start with a new scalar head also where `model` is a reward model, which keeps its own otherwise."""


class RewardModelConfig(StageConfig):
    """`rlhf-ray reward-model`: a scalar head trained on preference pairs (Stiennon et al. 2020)."""

    model: ModelConfig
    """Model to start from: usually the SFT model, which gets a new scalar head, or a reward model, which keeps its
    head."""
    data: PreferencesConfig
    """Preference pairs."""
    training: RewardModelTrainingConfig = Field(default_factory=RewardModelTrainingConfig)
    """Loss, batches and evaluation."""
    learner: Annotated[RewardLearnerConfig, RoleFacts(
        worker="reward_model_learner", station="learning", writes=True,
    )] = Field(default_factory=RewardLearnerConfig)
    """The model under training."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When to save."""


class ProcessRewardConfig(StageConfig):
    """`rlhf-ray process-reward`: a language model that judges each step of a solution (Lightman et al. 2023)."""

    model: StartModel
    """Model to start from: a `path`, or an `architecture` and `tokenizer` to make one."""
    data: ProcessRowsConfig
    """Solutions whose steps are labelled."""
    steps: StepsConfig
    """Tokens at which steps are judged, and the tokens predicted there."""
    training: SupervisedTrainingConfig = Field(default_factory=SupervisedTrainingConfig)
    """Batches and evaluation."""
    learner: Annotated[RewardLearnerConfig, RoleFacts(
        worker="process_reward_learner", station="learning", writes=True,
    )] = Field(default_factory=RewardLearnerConfig)
    """The model under training."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When to save."""


class SamplePairsConfig(Section):
    """Pairs of samples from one model, ranked by a judge."""

    judge: UserPath = Field("vader", min_length=1)
    """Judge that ranks the two samples of a pair: a scorer as in `compare --scorer` (vader, a reward model,
    exact_match, number, file.py:function, the address of a service, a .yaml file with `rewards`)."""
    min_margin: float = Field(0.1, ge=0)
    """Pairs whose scores differ by less, or are equal, are left out (and counted)."""


class PreferencesStageConfig(StageConfig):
    """`rlhf-ray preferences`: sample pairs of responses from a model and rank each pair by a judge."""

    model: ModelConfig
    """Model to sample from."""
    prompts: PromptsConfig
    """Prompts to respond to, one pair each."""
    generator: Annotated[GenerationConfig, _GENERATOR] = Field(default_factory=GenerationConfig)
    """vLLM workers."""
    pairs: SamplePairsConfig = Field(default_factory=SamplePairsConfig)
    """How pairs are ranked."""

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.prompts.max_tokens + self.generator.sampling.max_tokens

    @property
    def longest_sample_field(self) -> str:
        """As in `Derived`."""
        return (f"prompts.max_tokens={self.prompts.max_tokens} + "
                f"generator.sampling.max_tokens={self.generator.sampling.max_tokens}")


def check_revision(path: str | None, revision: str | None) -> None:
    """Refuse a revision of no model."""
    if revision and not path:
        raise ValueError(f"revision={revision!r} without path, the model on the Hub that it is a revision of; set path")


class CriticConfig(PPOLearnerConfig):
    """The critic under training."""

    default_rate = 9e-6

    backbone: Literal["own", "policy"] = "own"
    """A separate model, or a value head on the policy. With "policy", one model is trained with the settings of
    `policy` on both losses (`algorithm.value_coef`), no critic is started, and other fields of this section are
    refused."""
    init: Literal["policy", "reward"] = "policy"
    """Start from the policy's weights with a new head, or from the reward model (the only one of `rewards`) with its
    head. With the latter, values leak the reward while λ < 1; the default avoids that."""
    path: UserPath | None = None
    """Another model to start from: directory in Hugging Face format, or a Hub name. A sequence classifier with one
    label keeps its head; other models get a new one."""
    revision: str | None = None
    """Hub revision of `path` (branch, tag or commit)."""
    head_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the hidden states before the value head, in updates only (Srivastava et al. 2014); values of
    experience are computed without it."""

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if self.path and self.init == "reward":
            raise ValueError(f"path={self.path!r} and init=reward both name the model that the critic starts from; "
                             "leave path empty, or set init to policy")
        check_revision(self.path, self.revision)
        return self


class ScorerConfig(PlacementConfig):
    """A frozen model that scores rollouts."""

    micro_batch_tokens: int = Field(8192, ge=8)
    """Maximum number of tokens in one forward pass."""
    shards: int = Field(1, ge=1)
    """Workers that hold one copy of a model together, each a shard of every parameter (ZeRO-3), for models larger than
    one GPU; `workers` is a multiple of it. They make every pass together, each over its share of the rows."""

    @property
    def replica_size(self) -> int:
        """As `PlacementConfig.replica_size`."""
        return self.shards

    @model_validator(mode="after")
    def _whole_copies(self) -> Self:
        if self.workers % self.shards:
            raise ValueError(f"workers={self.workers} is not a multiple of shards={self.shards}, so the last copy of "
                             "the model would lack some; set workers to "
                             f"{-(-self.workers // self.shards) * self.shards}")
        if self.shards > 1 and 0 < self.gpus < 1:
            raise ValueError(f"shards={self.shards} exchanges parameters by NCCL, which refuses two processes on one "
                             f"GPU, but gpus={self.gpus:g} shares GPUs; set gpus to 1")
        return self


class ReferenceConfig(ScorerConfig):
    """The frozen model from which the KL is measured."""

    path: UserPath | None = None
    """Directory in Hugging Face format, or Hub name; if empty, the model that the policy starts from. It needs the
    policy's tokenizer. A model that is named here is loaded also with `algorithm.kl.coef: 0`, to measure the KL."""
    revision: str | None = None
    """Hub revision of `path` (branch, tag or commit)."""

    @model_validator(mode="after")
    def _revision_of_path(self) -> Self:
        check_revision(self.path, self.revision)
        return self


class RewardScorerConfig(ScorerConfig):
    """The workers that compute the rewards, and the handling of samples that cannot be scored."""

    on_failure: Literal["fail", "quarantine"] = "fail"
    """If a sample cannot be scored: "fail" ends the run; "quarantine" replaces its prompt by another one and lists it
    in quarantine.jsonl. A reward source that fails as a whole ends the run in both cases. Episodes that failed follow
    `environments.NAME.on_failure`."""
    quarantine_limit: float = Field(0.01, gt=0, le=1)
    """Maximum share of prompts in quarantine (at least one is allowed, but never all). If more than 1 in 100 cannot be
    scored, the reward is more likely to be broken than the prompts, and the remaining data is a biased selection."""


class PPOConfig(StageConfig):
    """`rlhf-ray ppo`: proximal policy optimisation for rewards, with a reference KL."""

    model: ModelConfig
    """Policy to start from; also the frozen reference, unless `reference.path` names another."""
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    """Named reward components, whose weighted sum is the score. With `environments`, a component `environment` of type
    environment is added if there is none of that type."""
    prompts: PromptsConfig
    """Prompts that rollouts start from."""
    generator: Annotated[GenerationConfig, _GENERATOR] = Field(default_factory=GenerationConfig)
    """vLLM rollout workers."""
    environments: dict[str, EnvironmentConfig] = Field(default_factory=dict)
    """Environments in which the policy acts over several turns, by name; empty: each sample is one response. With
    several, the rows' column `episode_runner.column` chooses one."""
    episode_runner: Annotated[EpisodeRunnerConfig, RoleFacts(
        worker="episode_runner", station="generation", phase="episodes", colour="episode_runner",
        advice="faster environments, more of their processes (environments.NAME.processes), or more runners "
               "(episode_runner.workers)",
    )] = Field(default_factory=EpisodeRunnerConfig)
    """Workers that run the episodes, on CPUs; started if there are `environments`."""
    reference: Annotated[ReferenceConfig, RoleFacts(
        worker="reference_scorer", station="scoring", phase="reference", colour="reference",
        advice="more reference scorers (reference.workers)",
    )] = Field(default_factory=ReferenceConfig)
    """Frozen reference model. Not started with `policy.lora`, whose frozen base is the reference unless `path` names
    another, nor if nothing needs it: with `algorithm.kl.coef: 0`, without `early_stop.kl_above`, without `path`, and
    if `checkpoint.best_metric` is neither kl nor perplexity."""
    reward: Annotated[RewardScorerConfig, RoleFacts(
        worker="reward_scorer", station="scoring", phase="reward", colour="reward",
        advice="more reward scorers (reward.workers), or a lighter reward",
    )] = Field(default_factory=RewardScorerConfig)
    """Workers that compute the rewards."""
    assembler: Annotated[PlacementConfig, RoleFacts(
        worker="assembler", station="assembly", phase="assemble", writes=True,
        advice="more assemblers (assembler.workers)",
    )] = Field(default_factory=lambda: PlacementConfig(cpus=0.05))
    """Turns rollouts and scores into experience."""
    policy: Annotated[PolicyConfig, RoleFacts(
        worker="policy_learner", station="learning", phase="policy_update", passes="logprobs", colour="policy",
        writes=True, advice="more policy ranks (policy.workers), or fewer passes over each batch (algorithm.epochs)",
    )] = Field(default_factory=PolicyConfig)
    """The policy under training."""
    critic: Annotated[CriticConfig, RoleFacts(
        worker="critic_learner", station="learning", phase="critic_update", passes="values", colour="critic",
        writes=True, advice="more critic ranks (critic.workers), or fewer passes over each batch (algorithm.epochs)",
    )] = Field(default_factory=CriticConfig)
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

    @model_validator(mode="before")
    @classmethod
    def _environments_reward(cls, given: Any) -> Any:
        """Environments give rewards, unless `rewards` says how."""
        if not isinstance(given, dict) or not given.get("environments"):
            return given
        rewards = given.get("rewards") or {}
        if not isinstance(rewards, dict):  # reported with the other problems
            return given
        if any((as_set(reward) or {}).get("type") == "environment" for reward in rewards.values()):
            return given
        return {**given, "rewards": {"environment": {"type": "environment"}, **rewards}}

    @model_validator(mode="before")
    @classmethod
    def _samples_of_groups(cls, given: Any) -> Any:
        """Fill in the samples of a prompt that nobody set, for an estimator that compares them: the default of the
        command that is named after it, or else of `grpo`. Such commands have it themselves. The preset is filled in
        before: pydantic calls the later of these methods first."""
        if cls is not PPOConfig or not isinstance(given, dict):
            return given
        estimator = tag_of((as_set(given.get("algorithm")) or {}).get("estimator"), "gae")
        coordinator = as_set(given.get("coordinator", {}))
        if estimator not in GROUP_ESTIMATORS or coordinator is None:
            return given
        groups = RLOOGroups if estimator == "rloo" else GRPOGroups
        default = groups.model_fields["samples_per_prompt"].default
        return {**given, "coordinator": {"samples_per_prompt": default, **coordinator}}

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        """Fill in what `algorithm.preset` has for several sections and nobody set."""
        preset = (as_set(given.get("algorithm")) or {}).get("preset") if isinstance(given, dict) else None
        if preset is None:
            return given
        sampling = as_set((as_set(given.get("generator")) or {}).get("sampling")) or {}
        environments = as_set(given.get("environments")) or {}
        # The longest response is that of an episode, where there are environments.
        section = EnvironmentConfig if environments else SamplingConfig
        default = section.model_fields["max_tokens"].default
        lengths = [(as_set(each) or {}).get("max_tokens", default) for each in environments.values() or [sampling]]
        try:
            longest = max(map(int, lengths))
        except (TypeError, ValueError):  # reported with the other problems
            return given
        return fill(given, preset, wholes={"generator.sampling.max_tokens": longest})


class GRPOConfig(PPOConfig):
    """`rlhf-ray grpo`: the stage `ppo` with the defaults of GRPO, which compares several samples of each prompt and
    needs neither critic nor reference."""

    algorithm: GRPOAlgorithm = Field(default_factory=GRPOAlgorithm)
    """Losses and their hyperparameters."""
    coordinator: GRPOGroups = Field(default_factory=GRPOGroups)
    """Batch size, staleness and concurrency."""


TRAINING = ("policy", "critic", "ptx", "algorithm", "coordinator", "buffer", "weights", "checkpoint", "early_stop")
"""Sections of a PPO run that an evaluation alone does not use."""


def _from_first(numbered: Any) -> Any:
    """Numbered rows of `prompts` as an evaluation's own, which would otherwise follow after them."""
    given = {"count": numbered} if type(numbered) is int else as_set(numbered)
    if given is None:  # reported with the other problems
        return numbered
    return given if given.get("first") is not None else {**given, "first": 0}


class EvaluateConfig(PPOConfig):
    """`rlhf-ray evaluate`: a model on its held-out prompts, in environments or by rewards alone, without training. Of a
    file for training, what concerns training is left out; a reference is started only if `reference.path` names
    one."""

    algorithm: GRPOAlgorithm = Field(default_factory=GRPOAlgorithm)
    """Not used."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Held-out prompts, and how responses are sampled; without `prompts.held_out` and data of its own, all prompts."""

    @model_validator(mode="before")
    @classmethod
    def _all_prompts(cls, given: Any) -> Any:
        """Without held-out rows, and without data of its own, the evaluation takes those of `prompts`."""
        prompts = as_set(given.get("prompts")) if isinstance(given, dict) else None
        evaluation = as_set((given.get("evaluation") or {}) if isinstance(given, dict) else None)
        if prompts is None or evaluation is None or prompts.get("held_out"):
            return given
        if any(evaluation.get(name) is not None for name in ("prompts", "numbered")) or evaluation.get("mix"):
            return given
        names = ("subset", "revision", "split", "column")
        taken: dict[str, Any] = {name: prompts[name] for name in names if name in prompts}
        paths = [prompts.get("path"), *((as_set(part) or {}).get("path") for part in prompts.get("mix") or ())]
        if any(path and not is_file_of_rows(str(path)) for path in paths) and not taken.get("split"):
            taken["split"] = PromptsConfig.SPLIT
        if prompts.get("path") is not None:
            taken["prompts"] = prompts["path"]
        if prompts.get("numbered") is not None:
            return {**given, "evaluation": {**evaluation, "numbered": _from_first(prompts["numbered"])}}
        if isinstance(mix := prompts.get("mix"), list):
            parts = [as_set(part) for part in mix]
            if None in parts:  # reported with the other problems
                return given
            taken["mix"] = [{name: _from_first(value) if name == "numbered" else value
                             for name, value in (part or {}).items() if name != "weight"} for part in parts]
        limits = (prompts.get("limit"), evaluation.get("limit", EvaluationConfig.model_fields["limit"].default))
        if known := [limit for limit in limits if isinstance(limit, int)]:
            taken["limit"] = min(known)
        return {**given, "evaluation": {**evaluation, **taken}}


class RLOOConfig(PPOConfig):
    """`rlhf-ray rloo`: the stage `ppo` with the defaults of RLOO, which compares several samples of each prompt and
    needs no critic."""

    algorithm: RLOOAlgorithm = Field(default_factory=RLOOAlgorithm)
    """Losses and their hyperparameters."""
    coordinator: RLOOGroups = Field(default_factory=RLOOGroups)
    """Batch size, staleness and concurrency."""


class ReinforceConfig(PPOConfig):
    """`rlhf-ray reinforce`: the stage `ppo` with the defaults of REINFORCE, which has neither critic nor groups."""

    algorithm: ReinforceAlgorithm = Field(default_factory=ReinforceAlgorithm)
    """Losses and their hyperparameters."""
