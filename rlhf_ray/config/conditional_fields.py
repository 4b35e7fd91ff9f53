"""Fields that have an effect under a condition only. A value without effect that differs from the default is refused;
where one configuration is meant to run in several places, it is a warning.

Each row of `CONDITIONAL_FIELDS` has some fields, the condition under which they have an effect, the reason why they
have none otherwise, and the remedy.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.data import DataSection, DemonstrationsConfig, is_file_of_rows
from rlhf_ray.config.derived import derive, has_later_steps, placements_of, reward_sections
from rlhf_ray.config.fields import changed_fields, format_value
from rlhf_ray.config.presets import gives
from rlhf_ray.config.rewards import LOCAL_MODELS, FunctionReward, HTTPReward, RegexReward
from rlhf_ray.config.stages import (
    PPOConfig,
    PreferencesStageConfig,
    ProcessRewardConfig,
    RewardModelConfig,
    SFTConfig,
    StageConfig,
)


@dataclass(frozen=True)
class ConditionalFields:
    """Fields with a common condition."""

    fields: tuple[str, ...]
    """Dotted paths; * stands for any part of one."""
    act_if: Callable[[Any, Any], bool]
    """Whether they act, given the stage's configuration and the section that holds the field."""
    reason: str
    """Why they have no effect otherwise; {config...} and {section...} are replaced by values."""
    fix: str = ""
    """How to make them act; empty if nothing does in this stage."""
    excluded: tuple[str, ...] = ()
    """Paths that match `fields` but do not have the condition."""
    warns: bool = False
    """Warn instead of refusing: the same configuration is meant to run in several places."""


def _never(_: Any, __: Any) -> bool:
    return False


def _has_critic(config: PPOConfig, _: Any) -> bool:
    return config.algorithm.has_critic


def _probabilities_move(config: PPOConfig, _: Any) -> bool:
    """Whether the policy's probabilities in a step can differ from the old ones."""
    return has_later_steps(config) or config.policy.drops_out or config.algorithm.old_logprobs == "generator"


def _values_move(config: PPOConfig, _: Any) -> bool:
    """Whether the critic's values in a step can differ from the old ones."""
    critic = config.critic if config.critic.backbone == "own" else config.policy
    return has_later_steps(config) or critic.drops_out or config.critic.head_dropout > 0


def _writes_prompts(_: Any, data: DemonstrationsConfig) -> bool:
    """Whether there are prompts with responses, or may be: of a format that nobody sets."""
    return any(part.prompt is not None or not part.names_format for part in data.parts())


def _has_conversations(_: Any, data: DemonstrationsConfig) -> bool:
    """Whether there are conversations, or may be."""
    return any(part.messages is not None or not part.names_format for part in data.parts())


def _rounds_logits(config: StageConfig, _: Any) -> bool:
    """Whether a stage's language model computes in bfloat16, in generators or in learners."""
    half = config.model.dtype == "bfloat16"  # type: ignore[attr-defined]
    if isinstance(config, PPOConfig):
        return half or config.policy.autocast == "bfloat16"
    if isinstance(config, SFTConfig | ProcessRewardConfig):
        return config.learner.autocast == "bfloat16" or (half and config.learner.lora is not None)
    return half


def _beyond_files(_: Any, section: Any) -> bool:
    """Whether a section's rows come from elsewhere than files, which have no splits."""
    parts = section.parts() if isinstance(section, DataSection) else [section]
    return not all(is_file_of_rows(part.path or "") or getattr(part, "numbered", None) for part in parts)


def _has_texts(_: Any, section: Any) -> bool:
    """Whether a section has rows that are read, and not numbered."""
    return section.numbered is None


_NO_METRICS = "this stage makes no updates and writes no metrics"
_NO_LEARNERS = "this stage has no learners"
_ONE_STEP = "with epochs=1 and mini_batches=1 an update has one step, which begins where the samples came from"
_NO_CRITIC = "algorithm.estimator={config.algorithm.estimator.type} uses no critic"

_EVERY_STAGE = (
    ConditionalFields(
        ("cluster.object_store_mb", "cluster.dashboard", "cluster.metrics_port"),
        lambda config, _: config.cluster.address is None,
        "the cluster at cluster.address={config.cluster.address} has its own", "", warns=True),
    ConditionalFields(
        ("pools.*",), lambda config, pool: any(config.pools[p.pool] is pool for p in placements_of(config).values()),
        "no role is placed in this pool, so it is not reserved", "name it in the `pool` of a role", warns=True),
    ConditionalFields(
        ("pools.*.strategy",), lambda _, pool: pool.bundles > 1,
        "it places several bundles, and this pool has one", "raise its bundles"),
    ConditionalFields(
        ("*.optimizer.min_ratio",), lambda _, optimizer: optimizer.decay != "constant",
        "with optimizer.decay=constant the learning rate does not fall", "set decay to linear or cosine"),
    ConditionalFields(
        tuple(f"{section}.{name}" for section in ("data", "prompts", "ptx", "*.mix.*")
              for name in ("split", "subset", "revision")), _beyond_files, "the rows come from files"),
    ConditionalFields(
        tuple(f"prompts.{name}" for name in ("limit", "column", "system", "as_chat")), _has_texts,
        "prompts.numbered has {section.numbered.count} rows without texts", "set prompts.path"),
    ConditionalFields(
        tuple(f"*.mix.*.{name}" for name in ("limit", "column")),
        lambda _, source: getattr(source, "numbered", None) is None,
        "the data set has numbered rows without texts", "set its path"),
    ConditionalFields(
        ("learner.zero_stage", "policy.zero_stage", "critic.zero_stage"),
        lambda _, learner: learner.zero_stage != 2 or learner.workers > 1 or learner.offload_optimizer,
        "there is nothing to divide on one rank", "raise workers"),
    ConditionalFields(
        ("model.float32_head",), lambda config, _: not isinstance(config, RewardModelConfig),
        "the scalar head of a reward model is float32 in any case"),
    ConditionalFields(
        ("model.float32_head",), _rounds_logits, "nothing computes the logits in bfloat16",
        "set model.dtype or autocast to bfloat16", warns=True),
    ConditionalFields(
        ("rewards.*.float32_head",), _never, "no log-probabilities of a reward model are compared with a generator's"),
)
_TRACKED = (
    ConditionalFields(
        ("logging.project", "logging.run_name", "logging.tags"), lambda _, logging: bool(logging.trackers),
        "they describe the run to its trackers, and logging.trackers is empty", "set logging.trackers", warns=True),
)
_SUPERVISED = _TRACKED + (
    ConditionalFields(
        ("logging.samples",), _never, "this stage generates no samples"),
    ConditionalFields(
        ("logging.judge",), _never, "this stage generates no responses to judge"),
    ConditionalFields(
        ("logging.profile_step",), _never, "only PPO profiles steps"),
    ConditionalFields(
        ("training.eval_every",), lambda config, _: config.data.held_out > 0,
        "with data.held_out=0 there are no rows to evaluate on", "set data.held_out"),
    ConditionalFields(
        ("cluster.max_restarts",), _never,
        "this stage has no generator, scorer or assembler; a lost learner counts for cluster.max_learner_restarts"),
)
_SFT = (
    ConditionalFields(
        ("data.text",), lambda _, data: data.prompt is None and data.messages is None,
        "data.prompt and data.messages name the columns of other formats", "leave both empty"),
    ConditionalFields(
        ("data.response", "data.as_chat"), _writes_prompts, "data.prompt is empty, so rows are whole texts or "
        "conversations", "set data.prompt"),
    ConditionalFields(
        ("data.system",), lambda config, data: _has_conversations(config, data) or _writes_prompts(config, data),
        "rows are whole texts, not chat messages", "set data.messages or data.prompt"),
)
_PREFERENCES = (
    ConditionalFields(
        ("run.steps", "run.epochs"), _never,
        "this stage makes no updates: it samples a pair for each prompt once (prompts.limit)"),
    ConditionalFields(
        ("run.auto_resume",), lambda config, _: config.cluster.address is not None,
        "this stage saves no checkpoints to continue from"),
    ConditionalFields(
        ("logging.tensorboard", "logging.ray_metrics", "logging.trackers", "logging.project", "logging.run_name",
         "logging.tags", "logging.samples", "logging.profile_step"), _never, _NO_METRICS),
    ConditionalFields(("logging.judge",), _never, "this stage ranks by pairs.judge"),
    ConditionalFields(("cluster.max_learner_restarts",), _never, _NO_LEARNERS),
    ConditionalFields(("prompts.shuffle",), _never, "every prompt is sampled once, and pairs are written in its order"),
    ConditionalFields(("prompts.mix.*.weight",), _never, "every prompt of each data set is sampled once"),
    ConditionalFields(("generator.sleep_level",), _never, _NO_LEARNERS + " to free a GPU for"),
)
_PPO = _TRACKED + (
    ConditionalFields(
        ("algorithm.estimator.lam",), lambda _, estimator: estimator.lam_alpha is None,
        "lam_alpha={section.lam_alpha} takes its place", "leave lam_alpha empty"),
    ConditionalFields(
        ("algorithm.value_clip", "algorithm.critic_warmup_steps"), _has_critic, _NO_CRITIC, "use estimator=gae"),
    ConditionalFields(
        ("algorithm.target_kl",), lambda _, algorithm: algorithm.epochs * algorithm.mini_batches > 1,
        "with epochs=1 and mini_batches=1 an update has only its first step, which is always made",
        "raise epochs or mini_batches"),
    ConditionalFields(
        tuple(f"algorithm.loss.{name}" for name in ("clip_low", "clip_high", "dual_clip", "min_ratio", "max_ratio")),
        _probabilities_move, _ONE_STEP,
        "raise epochs or mini_batches"),
    ConditionalFields(("algorithm.value_clip",), _values_move, _ONE_STEP, "raise epochs or mini_batches"),
    ConditionalFields(
        ("algorithm.value_coef",), lambda config, _: derive(config).shares_backbone,
        "policy and critic are not one model, so their losses are not added", "set critic.backbone to policy"),
    ConditionalFields(
        ("algorithm.overlong_penalty",), lambda _, algorithm: algorithm.overlong_buffer is not None,
        "overlong_buffer is empty, so long responses have no penalty", "set overlong_buffer"),
    ConditionalFields(
        ("algorithm.importance.cap",), lambda _, importance: importance.tokens in ("truncate", "mask"),
        "tokens={section.tokens} has no cap", "set tokens to truncate or mask"),
    ConditionalFields(
        ("algorithm.importance.band",), lambda _, importance: importance.tokens == "band",
        "tokens={section.tokens} has no band", "set tokens to band"),
    ConditionalFields(
        ("algorithm.importance.level",), lambda _, importance: importance.tokens != "none",
        "tokens=none weights no tokens", "set tokens to truncate, mask or band"),
    ConditionalFields(
        ("algorithm.importance.geometric",), lambda _, importance: "geometric" in importance.masks,
        "the mask geometric is not among masks={section.masks}", "add it"),
    ConditionalFields(
        ("algorithm.importance.outlier",), lambda _, importance: "outlier" in importance.masks,
        "the mask outlier is not among masks={section.masks}", "add it"),
    ConditionalFields(
        ("algorithm.kl.unbiased",), lambda config, kl: config.algorithm.kl_in_loss and kl.coef > 0,
        "with placement={section.placement} and coef={section.coef:g} the loss has no penalty",
        "set placement to loss and a positive coef"),
    ConditionalFields(
        ("algorithm.kl.target", "algorithm.kl.horizon"), lambda _, kl: kl.kind == "adaptive",
        "kind={section.kind} leaves the coefficient as it is", "set algorithm.kl.kind to adaptive"),
    ConditionalFields(
        ("critic.*",), _has_critic, _NO_CRITIC, "use estimator=gae"),
    ConditionalFields(
        ("critic.*",), lambda config, _: config.critic.backbone == "own",
        "with critic.backbone=policy one model is trained with the settings of `policy`",
        "set it there, or critic.backbone to own", excluded=("critic.backbone",)),
    ConditionalFields(
        ("reference.*",), lambda config, _: derive(config).uses_reference,
        "with algorithm.kl.coef=0 nothing needs a reference", "set reference.path to measure the KL from it",
        warns=True),
    ConditionalFields(
        ("reference.*",), lambda config, _: not derive(config).policy_is_reference,
        "with policy.lora the policy's frozen base is the reference", "name another model with reference.path"),
    ConditionalFields(
        ("reward.quarantine_limit",),
        lambda config, reward: reward.on_failure == "quarantine" or bool(config.environments),
        "with reward.on_failure=fail the first sample without a score ends the run", "set on_failure to quarantine"),
    ConditionalFields(
        ("reward.micro_batch_tokens", "reward.shards"),
        lambda config, _: any(isinstance(r, LOCAL_MODELS) for r in reward_sections(config).values()),
        "none of `rewards` is a local model", "add one of type model or process"),
    ConditionalFields(
        ("rewards.*.aggregate",), lambda _, reward: reward.placement == "outcome",
        "with placement=tokens each step has its own reward", "set placement to outcome"),
    ConditionalFields(
        ("rewards.*.answer",), lambda _, reward: not isinstance(reward, RegexReward) or reward.group is not None,
        "group is empty, so a match is sufficient", "set group"),
    ConditionalFields(
        ("evaluation.split", "evaluation.subset", "evaluation.revision", "evaluation.column"),
        lambda _, evaluation: evaluation.has_data,
        "evaluation.prompts and mix are empty, so the rows are those of prompts.held_out", "set evaluation.prompts"),
    ConditionalFields(
        ("evaluation.limit", "evaluation.column"), _has_texts,
        "evaluation.numbered has {section.numbered.count} rows without texts", "set evaluation.prompts"),
    ConditionalFields(
        ("evaluation.split", "evaluation.subset", "evaluation.revision"),
        lambda config, _: _beyond_files(config, derive(config).evaluation_prompts), "the rows come from files"),
    ConditionalFields(("evaluation.mix.*.weight",), _never, "every prompt of each data set is evaluated once"),
    ConditionalFields(
        ("evaluation.solved_at",),
        lambda config, _: any(isinstance(r, FunctionReward | HTTPReward) for r in config.rewards.values()),
        "none of `rewards` is a function or a service (verifiable rewards have their own `right`, and that of "
        "environments its own `solved_at`)", "add one"),
    ConditionalFields(
        ("episode_runner.*",), lambda config, _: bool(config.environments),
        "there are no environments, so no episodes are run", "add an environment", warns=True),
    ConditionalFields(
        ("episode_runner.column",), lambda config, _: len(config.environments) > 1,
        "there is one environment, which every row uses", "add another one", warns=True),
    ConditionalFields(
        ("episode_runner.gateway_host",),
        lambda config, _: any(each.path or each.command for each in config.environments.values()),
        "none of the environments can be an agent", "add one", warns=True),
    ConditionalFields(
        ("environments.*.processes",), lambda _, environment: not environment.isolated,
        "isolated=true gives each episode a process of its own", "set isolated to false", warns=True),
    ConditionalFields(
        ("environments.*.processes", "environments.*.isolated"), lambda _, environment: environment.command is None,
        "each episode of a command has a process of its own in any case", warns=True),
    ConditionalFields(
        ("environments.*.processes",), lambda _, environment: environment.processes <= environment.concurrency,
        "at most concurrency={section.concurrency} episodes are open, so no more processes than these start",
        "raise concurrency", warns=True),
    ConditionalFields(
        ("environments.*.python.programs",), lambda _, python: not python.keep_state,
        "keep_state=true gives each episode an interpreter of its own", "set keep_state to false", warns=True),
    ConditionalFields(
        ("environments.*.on_failure.retries",),
        lambda _, policy: "retry" in (policy.timeout, policy.environment, policy.agent),
        "on_failure begins no episode again (timeout={section.timeout}, environment={section.environment}, "
        "agent={section.agent})",
        "set one of them to retry", warns=True),
    *(ConditionalFields(
        (f"environments.*.timeout_s.{name}",),
        lambda _, limits, name=name: getattr(limits, name) <= limits.episode,  # type: ignore[misc]
        "the episode ends before, after timeout_s.episode={section.episode:g} s", "raise that", warns=True)
      for name in ("reset", "step")),
    *(ConditionalFields(
        (f"environments.*.{source}.{name}",),
        lambda config, section, source=source, name=name, limit=limit: all(  # type: ignore[misc]
            getattr(each, source) is not section or getattr(section, name) < getattr(each.timeout_s, limit)
            for each in config.environments.values()),
        f"the environment's timeout_s.{limit} ends it before", "lower it, or raise that", warns=True)
      for source, name, limit in (("mcp", "timeout_s", "step"), ("nemo_gym", "timeout_s", "step"),
                                  ("openenv", "connect_s", "reset"))),
    ConditionalFields(
        ("early_stop.patience",),
        lambda _, stop: stop.kl_above is not None or stop.reward_below_start is not None,
        "no limit is set", "set kl_above or reward_below_start"),
    ConditionalFields(
        ("weights.in_flight",), lambda config, _: config.coordinator.max_staleness > 0,
        "with coordinator.max_staleness=0 no response is in flight when new weights arrive", "raise max_staleness"),
)
_GENERATING = (
    ConditionalFields(
        ("generator.gpu_memory_utilization",),
        lambda _, generator: generator.gpus > 0 and generator.kv_cache_mb is None,
        "kv_cache_mb={section.cache_mb} sets the memory", "leave kv_cache_mb empty, on a GPU"),
)

CONDITIONAL_FIELDS: Mapping[type[StageConfig], tuple[ConditionalFields, ...]] = {
    StageConfig: _EVERY_STAGE,
    SFTConfig: _SUPERVISED + _SFT,
    RewardModelConfig: _SUPERVISED,
    ProcessRewardConfig: _SUPERVISED,
    PreferencesStageConfig: _GENERATING + _PREFERENCES,
    PPOConfig: _GENERATING + _PPO,
}
"""The rows of each stage and of those derived from it."""


def without_effect(config: StageConfig, *, warns: bool = False) -> Iterator[str]:
    """Sentences about the values of a configuration that differ from their default and have no effect.

    Args:
        warns: those that deserve a warning, instead of those that are refused.
    """
    rows = [row for stage, rows in CONDITIONAL_FIELDS.items() if isinstance(config, stage)
            for row in rows if row.warns == warns]
    preset = config.algorithm.preset if isinstance(config, PPOConfig) else None
    values_by_reason: dict[tuple[str, str], list[str]] = {}
    for path, section, value in changed_fields(config):
        if gives(preset, path, value):  # nobody set it
            continue
        for row in rows:
            matches = path not in row.excluded and any(fnmatchcase(path, pattern) for pattern in row.fields)
            if matches and not row.act_if(config, section):
                reason = row.reason.format(config=config, section=section)
                values_by_reason.setdefault((reason, row.fix), []).append(f"{path}={format_value(value)}")
                break
    if warns and isinstance(config, PPOConfig):
        yield from _of_other_types(config.algorithm)
    for (reason, fix), values in values_by_reason.items():
        has, it = ("has", "it") if len(values) == 1 else ("have", "them")
        yield f"{', '.join(values)} {has} no effect: {reason}; leave {it} out" + (f", or {fix}" if fix else "")


def _of_other_types(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Sentences about keys that were left out, because only other types of their union have them."""
    for name, section in (("estimator", algorithm.estimator), ("loss", algorithm.loss)):
        for key, (value, owners) in section.left_out.items():
            yield (f"algorithm.{name}.{key}={format_value(value)} has no effect with {name}={section.type}; it acts "
                   f"with {' or '.join(owners)}")


def check_effects(config: StageConfig) -> None:
    """Every value that differs from its default has an effect."""
    if sentences := list(without_effect(config)):
        raise ValueError("\n  ".join(sentences))
