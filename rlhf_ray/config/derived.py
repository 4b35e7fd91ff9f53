"""What follows from several sections of a configuration. Pure functions; `load.resolve` enters into the configuration
those values that a user may set too."""

import json
from dataclasses import dataclass
from typing import Any

from rlhf_ray.config.algorithm import OldLogprobs
from rlhf_ray.config.data import EvaluationPrompts, NumberedRows, PromptsConfig
from rlhf_ray.config.estimators import GDPOEstimator
from rlhf_ray.config.generation import (
    BUCKET_BETWEEN_GPUS_MB,
    BUCKET_FROM_GPU_MB,
    BUCKET_ON_CPU_MB,
    BUCKETS_IN_STORE,
    GenerationConfig,
)
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import (
    EnvironmentReward,
    FunctionReward,
    HTTPReward,
    ModelReward,
    RewardConfig,
    VerifiableReward,
)
from rlhf_ray.config.run import ClusterConfig, PlacementConfig
from rlhf_ray.config.scorer_names import scorer_rewards
from rlhf_ray.config.section import settled
from rlhf_ray.config.settled import is_set
from rlhf_ray.config.stages import (
    CriticConfig,
    EvaluateConfig,
    PPOConfig,
    PreferencesStageConfig,
    ProcessRewardConfig,
    ReferenceConfig,
    RewardModelConfig,
    SFTConfig,
    StageConfig,
)
from rlhf_ray.config.training_loop import BufferConfig, CoordinatorConfig

REFERENCE_METRICS = ("kl", "perplexity")
"""Metrics of an evaluation that are computed from the reference's log-probabilities."""


@dataclass(frozen=True)
class Derived:
    """What follows from the configuration of a PPO run."""

    uses_reference: bool
    """Whether anything needs log-probabilities of the reference: a positive coefficient, a limit or choice by metrics
    of it, or the configuration names it."""
    starts_reference: bool
    """Whether the reference has its own workers; a policy with adapters contains its own start as its frozen base."""
    reference_model: ModelConfig
    """The frozen model from which the KL is measured."""
    starts_critic: bool
    """Whether the critic is a separate model, and so a role."""
    shares_backbone: bool
    """Whether policy and critic are one model."""
    critic_model: ModelConfig
    """Model that the critic starts from."""
    old_logprobs: OldLogprobs
    """Source of the old log-probabilities: `algorithm.old_logprobs`, or "update" if the update's own forward pass
    gives them, so that no separate pass is needed (`update_gives_old_logprobs`)."""
    longest_response: int
    """Maximum tokens of a response, in training or evaluation."""
    longest_response_field: str
    """The field that sets it."""
    longest_sample: int
    """Maximum tokens of a prompt and its response, or of an episode, in training or evaluation."""
    longest_sample_field: str
    """The fields that set it, with their values: "prompts.max_tokens=64 + generator.sampling.max_tokens=32"."""
    evaluation_prompts: PromptsConfig | None
    """The section of `evaluation.prompts`, with missing fields taken from the training prompts; None if it names no
    data set."""
    evaluates_the_policy_itself: bool
    """Whether held-out responses are sampled from the distribution under training, so that the generators'
    log-probabilities minus the reference's estimate a KL. Truncated, greedy or other temperatures do not."""
    solved_at: dict[str, float]
    """Minimum score at which a component of the rewards counts as solved, by name; pass@k is reported for these
    only."""
    solved_by: str | None
    """The component that environments give; None without environments."""

    @property
    def policy_is_reference(self) -> bool:
        """Whether the reference is the frozen base of the policy's adapters."""
        return self.uses_reference and not self.starts_reference

    @property
    def reference_in_words(self) -> str:
        """The reference, for people."""
        if not self.uses_reference:
            return "none: algorithm.kl.coef=0, and nothing else needs one"
        base = "the frozen base of the policy's adapters, " if self.policy_is_reference else ""
        return f"{base}{self.reference_model.path}"


def training_sample(config: PPOConfig) -> tuple[int, str]:
    """Tokens of the longest prompt and response, or episode, under training, and the fields that set it:
    "prompts.max_tokens + generator.sampling.max_tokens"."""
    prompts = config.prompts.max_tokens
    sampling = config.generator.sampling.max_tokens
    if not config.environments:
        return prompts + sampling, "prompts.max_tokens + generator.sampling.max_tokens"
    name = longest_environment(config)
    return config.environments[name].max_tokens, f"environments.{name}.max_tokens"


def longest_environment(config: PPOConfig) -> str:
    """Name of the environment with the longest episodes."""
    return max(config.environments, key=lambda name: config.environments[name].max_tokens)


def open_episodes(config: PPOConfig) -> int:
    """Episodes that are open at the same time at most: those in flight, as far as the runners have places for them."""
    places = config.episode_runner.workers * sum(each.concurrency for each in config.environments.values())
    return min(places, concurrency_of(config.coordinator, config.generator))


def longest_row(config: StageConfig) -> int:
    """Tokens of the longest row, or pair of rows, which a learner's micro-batch must hold."""
    if isinstance(config, PPOConfig):
        return max(derive(config).longest_sample, config.ptx.max_tokens if config.ptx else 0)
    if isinstance(config, PreferencesStageConfig):
        return config.longest_sample
    longest: int = config.data.max_tokens  # type: ignore[attr-defined]
    return 2 * longest if isinstance(config, RewardModelConfig) else longest


def over_context(tokens: int, fields: str, model: str, context: int) -> str:
    """The message about samples that are longer than a model's context.

    Args:
        tokens: of the longest sample.
        fields: which set it, as in `Derived.longest_sample_field`.
    """
    several = " + " in fields
    total = f"{fields} = {tokens} tokens is" if several else f"{fields} tokens are"
    return f"{total} over the context of {model!r}, {context}; lower {'one of them' if several else 'it'}"


def unset_micro_batches(config: StageConfig) -> list[str]:
    """The fields `micro_batch_tokens` of learners on GPUs that nobody set, by dotted path."""
    paths = [f"{name}.micro_batch_tokens" for name, placement in placements_of(config).items()
             if isinstance(placement, LearnerConfig) and placement.gpus]
    return [path for path in paths if not is_set(config, path)]


def judge_rewards(config: PPOConfig) -> dict[str, RewardConfig]:
    """Components of the independent judge; none without one.

    Raises:
        ConfigError: `logging.judge` names no scorer.
    """
    judge = config.logging.judge
    return {} if judge is None else scorer_rewards(judge, "logging.judge")


def reward_sections(config: PPOConfig) -> dict[str, RewardConfig]:
    """All that the reward scorer runs, by field: the rewards, and the judge's components."""
    return {**{f"rewards.{name}": reward for name, reward in config.rewards.items()},
            **{f"logging.judge ({name})": reward for name, reward in judge_rewards(config).items()}}


def compared_components(config: PPOConfig) -> list[str]:
    """Components of the scores that the estimator compares each by itself (gdpo, those with a weight); empty if it
    compares the scores."""
    if not isinstance(config.algorithm.estimator, GDPOEstimator):
        return []
    return [name for name, reward in config.rewards.items() if reward.weight]


def derive(config: PPOConfig) -> Derived:
    """What follows from the configuration of a PPO run, which need not have passed its checks."""
    own_critic = config.critic.backbone == "own"
    training = config.generator.sampling
    uses_reference = bool(needs_reference(config))
    held_out = config.evaluation.sampling if config.evaluation else None
    reward_models = [reward for reward in config.rewards.values() if isinstance(reward, ModelReward)]
    responses = {"generator.sampling.max_tokens": training.max_tokens}
    if held_out is not None:
        responses["evaluation.sampling.max_tokens"] = held_out.max_tokens
    prompt = f"prompts.max_tokens={config.prompts.max_tokens} + "
    if config.environments:  # an episode's tokens include those of its prompt
        name = longest_environment(config)
        responses = {f"environments.{name}.max_tokens": config.environments[name].max_tokens}
        prompt = ""
    longest = max(responses, key=responses.__getitem__)
    return Derived(
        uses_reference=uses_reference,
        starts_reference=uses_reference and (config.policy.lora is None or config.reference.path is not None),
        reference_model=_other_model(config, config.reference) or config.model,
        starts_critic=config.algorithm.has_critic and own_critic,
        shares_backbone=config.algorithm.has_critic and not own_critic,
        critic_model=_other_model(config, config.critic) or (
            reward_models[0] if config.critic.init == "reward" and reward_models else config.model),
        old_logprobs="update" if update_gives_old_logprobs(config) else config.algorithm.old_logprobs,
        longest_response=responses[longest], longest_response_field=longest,
        longest_sample=responses[longest] + (0 if config.environments else config.prompts.max_tokens),
        longest_sample_field=f"{prompt}{longest}={responses[longest]}",
        evaluation_prompts=_evaluation_prompts(config),
        evaluates_the_policy_itself=held_out is None or held_out.same_distribution(training),
        solved_at=_solved_at(config),
        solved_by=next((name for name, reward in config.rewards.items() if isinstance(reward, EnvironmentReward)),
                       None),
    )


def needs_reference(config: PPOConfig) -> list[str]:
    """The settings that need log-probabilities of a reference: ["early_stop.kl_above=0.1"]."""
    coef = config.algorithm.kl.coef
    metric = config.checkpoint.best_metric
    needed = {  # the adaptive coefficient is positive
        f"algorithm.kl.coef={coef:g}": coef > 0,
        f"reference.path={config.reference.path}": config.reference.path is not None,
        f"early_stop.kl_above={config.early_stop.kl_above}": config.early_stop.kl_above is not None,
        f"checkpoint.best_metric={metric}": metric in REFERENCE_METRICS,
    }
    return [setting for setting, needs in needed.items() if needs]


def _other_model(config: PPOConfig, section: CriticConfig | ReferenceConfig) -> ModelConfig | None:
    """The model that a section names, in the policy's precisions; None if it names none. It runs no own code."""
    if section.path is None:
        return None
    return ModelConfig(path=section.path, revision=section.revision, dtype=config.model.dtype,
                       float32_head=config.model.float32_head)


def has_later_steps(config: PPOConfig) -> bool:
    """Whether an optimizer step is made with other weights than those that computed the old values: a later one of an
    update, or one on samples that waited."""
    return config.algorithm.epochs * config.algorithm.mini_batches > 1 or config.coordinator.max_staleness > 0


def update_gives_old_logprobs(config: PPOConfig) -> bool:
    """Whether the update's own forward pass gives the old log-probabilities.

    That requires a single optimizer step per batch, on-policy samples, and no dropout. Rewards and the adaptive
    coefficient must not need them before the update; metrics use the generators'.
    """
    a = config.algorithm
    one_backbone = a.has_critic and config.critic.backbone == "policy"
    only_one = not has_later_steps(config) and not one_backbone
    needed_before = a.kl.kind == "adaptive" or not (a.kl_in_loss or a.kl.coef == 0) or a.warmup_steps > 0
    return a.old_logprobs == "policy" and only_one and not needed_before and not config.policy.drops_out


def placements_of(config: StageConfig) -> dict[str, PlacementConfig]:
    """Placements of the roles that a stage starts, by section: of PPO the critic only if it is a separate model, the
    reference only if it is needed and not the policy's frozen base; of an evaluation no learner."""
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    if isinstance(config, PPOConfig):
        derived = derive(config)
        starts = {"critic": derived.starts_critic, "reference": derived.starts_reference,
                  "episode_runner": bool(config.environments), "policy": not isinstance(config, EvaluateConfig)}
        sections = {name: section for name, section in sections.items() if starts.get(name, True)}
    return {name: section for name, section in sections.items() if isinstance(section, PlacementConfig)}


def model_paths(config: StageConfig, role: str) -> list[str]:
    """Paths or Hub ids of the models that a role loads, by its section; every role of a stage loads the tokenizer of
    `model`."""
    model = getattr(config, "model", None)
    paths = [model.path] if isinstance(model, ModelConfig) else []
    if isinstance(config, PPOConfig) and role == "reward":
        paths += [reward.path for reward in reward_sections(config).values() if isinstance(reward, ModelReward)]
    if isinstance(config, PPOConfig) and role in ("critic", "reference"):
        paths.append(getattr(derive(config), f"{role}_model").path)
    return paths


def concurrency_of(coordinator: CoordinatorConfig, generator: GenerationConfig, generators: int | None = None) -> int:
    """Maximum number of samples in flight at `generators` generators, whose number may change during a run; at
    `generator.workers` if None."""
    workers = generator.workers if generators is None else generators
    return coordinator.concurrency or workers * generator.samples_in_flight


def episodes_deadline_s(config: PPOConfig) -> float:
    """Seconds for the episodes of one call to a runner: an environment may have to play all samples in flight, as many
    at a time as its `concurrency`, and each wave lasts until the deadlines of its episodes and of closing them."""
    in_flight = concurrency_of(config.coordinator, config.generator)
    waves = [(-(-in_flight // each.concurrency), each.timeout_s) for each in config.environments.values()]
    longest = max((number * (limit.episode + 2 * limit.step) for number, limit in waves), default=0.0)
    return longest + config.cluster.call_timeout_s


def episode_kind(config: PPOConfig) -> str:
    """What episodes of two configurations must have in common to be continued with each other's turns, as JSON: all
    that decides what is sampled and how an environment answers, but no deadline of the run's own, no number of
    processes, and no secret's name."""
    aside: Any = {"timeout_s": True, "concurrency": True, "processes": True, "isolated": True, "memory_mib": True,
                  "python": {"programs"}, "mcp": {"token_variable"}, "openenv": {"token_variable", "connect_s"},
                  "nemo_gym": {"token_variable"}}
    environments = {name: each.model_dump(mode="json", exclude=aside) for name, each in config.environments.items()}
    return json.dumps([config.run.seed, config.model.path, config.episode_runner.column,
                       config.generator.sampling.model_dump(mode="json"), environments])


def buffer_capacity_mb(buffer: BufferConfig, cluster: ClusterConfig) -> int | None:
    """Maximum MiB of experience held: by default half of a local cluster's object store, and on a joined cluster, which
    sizes its own store, None: no bound."""
    return buffer.capacity_mb or (None if cluster.address else cluster.object_store_mb // 2)


def transport_of(config: PPOConfig) -> str:
    """`weights.transport`, with "auto" resolved: "ipc" if the only generator certainly shares a GPU with a policy
    rank, "nccl" if all generators and ranks have whole GPUs, else "object_store"."""
    if config.weights.transport != "auto":
        return config.weights.transport
    if config.generator.engine == "in_process":
        return "object_store"
    if shares_one_gpu(config):
        return "ipc"
    return "nccl" if config.generator.gpus >= 1 and config.policy.gpus >= 1 else "object_store"


def bucket_mb(config: PPOConfig) -> int:
    """`weights.bucket_mb`, or its default for the transport and the devices.

    The object store holds three buckets at a time beside the experience. A local cluster's store may be too small for
    that; Ray then spills to disk.
    """
    if config.weights.bucket_mb is not None:
        return config.weights.bucket_mb
    if not (config.policy.gpus and config.generator.gpus):
        return BUCKET_ON_CPU_MB
    if transport_of(config) != "object_store":
        return BUCKET_BETWEEN_GPUS_MB
    experience = buffer_capacity_mb(config.buffer, config.cluster)
    if experience is None:
        return BUCKET_FROM_GPU_MB
    left = (config.cluster.object_store_mb - experience) // BUCKETS_IN_STORE
    return max(BUCKET_ON_CPU_MB, min(BUCKET_FROM_GPU_MB, left))


def shares_one_gpu(config: PPOConfig) -> bool:
    """Whether the only generator is certain to share the GPU of a policy rank. In a pool of several bundles, two
    generators may be in one bundle and two ranks in another. Two generators on one GPU would read a bucket by one
    handle, whose memory is given back when the first has read it."""
    generator = config.generator
    policy = config.policy
    pool = config.pools.get(config.generator.pool)
    fractions = generator.gpus > 0 and policy.gpus > 0 and generator.gpus + policy.gpus <= 1
    alone = generator.workers == 1 and generator.pool == policy.pool
    return pool is not None and alone and (pool.bundles, pool.gpus) == (1, 1) and fractions


def _evaluation_prompts(config: PPOConfig) -> PromptsConfig | None:
    if config.evaluation is None or not config.evaluation.has_data:
        return None
    return EvaluationPrompts(**dict(config.prompts) | {
        "path": config.evaluation.prompts, "numbered": _after_training(config, config.evaluation.numbered),
        "mix": [settled(each, numbered=_after_training(config, each.numbered)) for each in config.evaluation.mix],
        "subset": config.evaluation.subset,
        "revision": config.evaluation.revision, "split": config.evaluation.split,
        "column": config.evaluation.column, "held_out": 0.0,
        "limit": config.evaluation.limit if config.evaluation.numbered is None else None,
    })


def _after_training(config: PPOConfig, rows: NumberedRows | None) -> NumberedRows | None:
    """Numbered rows of an evaluation: unless they say otherwise, their indices follow those of all training rows."""
    if rows is None or rows.first is not None:
        return rows
    return settled(rows, first=max((part.numbers.indices.stop for part in config.prompts.parts() if part.numbers),
                                   default=0))


def _solved_at(config: PPOConfig) -> dict[str, float]:
    scores = {name: reward.right for name, reward in config.rewards.items()
              if isinstance(reward, VerifiableReward) and reward.right > reward.wrong}
    scores |= {name: reward.solved_at for name, reward in config.rewards.items()
               if isinstance(reward, EnvironmentReward)}
    other = config.evaluation.solved_at if config.evaluation else None
    if other is not None:
        scores |= {name: other for name, reward in config.rewards.items()
                   if isinstance(reward, FunctionReward | HTTPReward)}
    return scores


def evaluation_metrics(config: SFTConfig | RewardModelConfig | ProcessRewardConfig | PPOConfig) -> set[str]:
    """Names of the metrics that an evaluation of this run has."""
    if isinstance(config, SFTConfig):
        return {"loss"}
    if isinstance(config, RewardModelConfig):
        return {"loss", "accuracy", "margin", "score"}
    if isinstance(config, ProcessRewardConfig):
        return {"loss", "accuracy", "probability"}
    derived = derive(config)
    evaluation = config.evaluation
    powers = [2**i for i in range(evaluation.samples_per_prompt.bit_length())] if evaluation else []
    optional = {
        "kl": derived.uses_reference and derived.evaluates_the_policy_itself, "perplexity": derived.uses_reference,
        "gold": config.logging.judge is not None, "unscored": config.reward.on_failure == "quarantine",
    }
    episodes = {"solved", "failed", "turns"} if config.environments else set()
    return {"reward", "length", "finished", "distinct", "distinct_bigrams", "responses", *episodes,
            *(name for name, measured in optional.items() if measured),
            *(f"reward/{name}" for name in config.rewards),
            *(f"pass@{k}/{name}" for name in derived.solved_at for k in powers)}


def experience_kind(config: PPOConfig) -> dict[str, str]:
    """In words, by aspect, what the experience of one update has in common. Experience of another kind, as a run may
    have after a resume with other settings, would be trained on wrongly."""
    return {
        "old_logprobs": f"old log-probabilities of the {derive(config).old_logprobs}",
        "sampling": f"tokens sampled at {config.generator.sampling.kind}",
        "kl": f"the KL penalty in the {config.algorithm.kl.placement}",
    }
