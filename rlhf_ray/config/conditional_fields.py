"""Fields that have an effect under a condition only.

Each row of `CONDITIONAL_FIELDS` has some fields, the condition under which they have an effect, the reason why they
have none otherwise, and the remedy. A value without effect that differs from the default is a warning, so that one
configuration serves a sweep, several commands and several machines. It is refused if the run would be something else
than the value says: other data, another length, another reward, or without what was asked for; `instead` says which.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel

from rlhf_ray.config.data import DataSection, DemonstrationsConfig, is_file_of_rows
from rlhf_ray.config.derived import derive, has_later_steps, placements_of, reward_sections
from rlhf_ray.config.fields import changed_fields, format_value, type_tag
from rlhf_ray.config.presets import gives
from rlhf_ray.config.rewards import LOCAL_MODELS, FunctionReward, HTTPReward, RegexReward
from rlhf_ray.config.settled import is_derived
from rlhf_ray.config.stages import (
    TRAINING,
    EvaluateConfig,
    PPOConfig,
    PreferencesStageConfig,
    ProcessRewardConfig,
    RewardModelConfig,
    SFTConfig,
    StageConfig,
)
from rlhf_ray.config.type_union import TypedSection


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
    instead: str = ""
    """What the run would do instead of what a value says, for which it is refused; empty if a value is merely idle."""
    of_place: bool = False
    """Whether the condition depends on where the roles run, which may be derived from the machines later."""


@dataclass(frozen=True)
class IdleValue:
    """A value that differs from its default and has no effect."""

    path: str
    value: Any
    reason: str
    remedy: str
    """How to make it act; empty if nothing does."""
    refused: bool = False
    """Whether the run would be something else than the value says."""
    of_place: bool = False
    """As in `ConditionalFields`."""

    @property
    def shown(self) -> str:
        """`path=value`."""
        return f"{self.path}={format_value(self.value)}"


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
    """Whether a section, or a data set of a mix, has rows that are read, and not numbered."""
    return getattr(section, "numbered", None) is None


_NO_METRICS = "this stage makes no updates and writes no metrics"
_EVALUATES = "an evaluation makes no updates"
_NO_LEARNERS = "this stage has no learners"
_ONE_STEP = "with epochs=1 and mini_batches=1 an update has one step, which begins where the samples came from"
_NUMBERED = "`numbered` gives {section.numbered.count} rows without texts"
_NO_CRITIC = "algorithm.estimator={config.algorithm.estimator.type} uses no critic"

_EVERY_STAGE = (
    ConditionalFields(
        ("cluster.object_store_mb", "cluster.dashboard", "cluster.metrics_port"),
        lambda config, _: config.cluster.address is None,
        "the cluster at cluster.address={config.cluster.address} has its own"),
    ConditionalFields(
        ("pools.*",), lambda config, pool: any(config.pools[p.pool] is pool for p in placements_of(config).values()),
        "no role is placed in this pool, so it is not reserved", "name it in the `pool` of a role"),
    ConditionalFields(
        ("pools.*.strategy",), lambda _, pool: pool.bundles > 1,
        "it places several bundles, and this pool has one", "raise its bundles"),
    ConditionalFields(
        ("*.optimizer.min_ratio",), lambda _, optimizer: optimizer.decay != "constant",
        "with optimizer.decay=constant the learning rate does not fall", "set decay to linear or cosine"),
    ConditionalFields(
        tuple(f"{section}.{name}" for section in ("data", "prompts", "ptx", "*.mix.*")
              for name in ("split", "subset", "revision")),
        _beyond_files, "the rows come from files", instead="read all of them"),
    ConditionalFields(
        ("prompts.limit",), _has_texts, _NUMBERED, "set prompts.path", instead="use them all"),
    ConditionalFields(
        ("prompts.system",), _has_texts, _NUMBERED, "set prompts.path", instead="have no system message"),
    ConditionalFields(
        ("prompts.column", "prompts.as_chat"), _has_texts, _NUMBERED, "set prompts.path"),
    ConditionalFields(
        ("*.mix.*.limit",), _has_texts, _NUMBERED, "set its path", instead="use them all"),
    ConditionalFields(
        ("*.mix.*.column",), _has_texts, _NUMBERED, "set its path"),
    ConditionalFields(
        ("learner.zero_stage", "policy.zero_stage", "critic.zero_stage"),
        lambda _, learner: learner.zero_stage != 2 or learner.workers > 1 or learner.offload_optimizer,
        "there is nothing to divide on one rank", "raise workers", of_place=True),
    ConditionalFields(
        ("checkpoint.best_mode",), lambda _, checkpoint: checkpoint.best_metric is not None,
        "best_metric is empty, so no step is the best", "set checkpoint.best_metric, for example to reward"),
    ConditionalFields(
        ("model.float32_head",), lambda config, _: not isinstance(config, RewardModelConfig),
        "the scalar head of a reward model is float32 in any case"),
    ConditionalFields(
        ("model.float32_head",), _rounds_logits, "nothing computes the logits in bfloat16",
        "set model.dtype or autocast to bfloat16"),
    ConditionalFields(
        ("rewards.*.float32_head",), _never, "no log-probabilities of a reward model are compared with a generator's"),
)
_TRACKED = (
    ConditionalFields(
        ("logging.project", "logging.run_name", "logging.tags"), lambda _, logging: bool(logging.trackers),
        "they describe the run to its trackers, and logging.trackers is empty", "set logging.trackers"),
)
_SUPERVISED = _TRACKED + (
    ConditionalFields(
        ("logging.samples",), _never, "this stage generates no samples"),
    ConditionalFields(
        ("logging.judge",), _never, "this stage generates no responses to judge", instead="write no gold score"),
    ConditionalFields(
        ("logging.profile_step",), _never, "only PPO profiles steps", instead="write no profile"),
    ConditionalFields(
        ("training.eval_every",), lambda config, _: config.data.held_out > 0,
        "with data.held_out=0 there are no rows to evaluate on", "set data.held_out", instead="measure nothing"),
    ConditionalFields(
        ("cluster.max_restarts",), _never,
        "this stage has no generator, scorer or assembler; a lost learner counts for cluster.max_learner_restarts"),
)
_SFT = (
    ConditionalFields(
        ("data.text",), lambda _, data: data.prompt is None and data.messages is None,
        "data.prompt and data.messages name the columns of other formats", "leave both empty",
        instead="train on those"),
    ConditionalFields(
        ("data.response", "data.as_chat"), _writes_prompts, "data.prompt is empty, so rows are whole texts or "
        "conversations", "set data.prompt", instead="train on all of each"),
    ConditionalFields(
        ("data.system",), lambda config, data: _has_conversations(config, data) or _writes_prompts(config, data),
        "rows are whole texts, not chat messages", "set data.messages or data.prompt",
        instead="have no system message"),
)
_PREFERENCES = (
    ConditionalFields(
        ("run.steps", "run.epochs"), _never,
        "this stage makes no updates", "set prompts.limit", instead="sample a pair for each prompt once"),
    ConditionalFields(
        ("run.auto_resume",), lambda config, _: config.cluster.address is not None,
        "this stage saves no checkpoints to continue from", instead="end with the first failure"),
    ConditionalFields(
        ("logging.tensorboard", "logging.ray_metrics", "logging.project", "logging.run_name", "logging.tags",
         "logging.samples"), _never, _NO_METRICS),
    ConditionalFields(
        ("logging.trackers", "logging.profile_step"), _never, _NO_METRICS,
        instead="write nothing there"),
    ConditionalFields(
        ("logging.judge",), _never, "this stage ranks by pairs.judge", "set that", instead="rank by another judge"),
    ConditionalFields(("cluster.max_learner_restarts",), _never, _NO_LEARNERS),
    ConditionalFields(("prompts.shuffle",), _never, "every prompt is sampled once, and pairs are written in its order"),
    ConditionalFields(
        ("prompts.mix.*.weight",), _never, "every prompt of each data set is sampled once", "set limit of each",
        instead="have as many pairs of each as it has prompts"),
    ConditionalFields(("generator.sleep_level",), _never, _NO_LEARNERS + " to free a GPU for"),
)
_PPO = _TRACKED + (
    ConditionalFields(
        ("algorithm.estimator.lam",), lambda _, estimator: estimator.lam_alpha is None,
        "lam_alpha={section.lam_alpha} takes its place", "leave lam_alpha empty", instead="have another lambda"),
    ConditionalFields(
        ("algorithm.value_clip", "algorithm.critic_warmup_steps"), _has_critic, _NO_CRITIC, "use estimator=gae"),
    ConditionalFields(
        ("algorithm.target_kl",), lambda _, algorithm: algorithm.epochs * algorithm.mini_batches > 1,
        "with epochs=1 and mini_batches=1 an update has only its first step, which is always made",
        "raise epochs or mini_batches"),
    ConditionalFields(
        tuple(f"algorithm.loss.{name}" for name in ("clip_low", "clip_high", "dual_clip")),
        _probabilities_move, _ONE_STEP,
        "raise epochs or mini_batches"),
    ConditionalFields(
        ("algorithm.loss.min_ratio", "algorithm.loss.max_ratio"),
        lambda config, loss: _probabilities_move(config, loss) or not loss.min_ratio <= 1 <= loss.max_ratio, _ONE_STEP,
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
        "set it there, or critic.backbone to own", excluded=("critic.backbone",),
        instead="train the critic with others than these"),
    ConditionalFields(
        ("reference.*",), lambda config, _: derive(config).uses_reference,
        "with algorithm.kl.coef=0 nothing needs a reference", "set reference.path to measure the KL from it"),
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
        "group is empty, so a match is sufficient", "set group", instead="compare no answers"),
    ConditionalFields(
        ("evaluation.split", "evaluation.subset", "evaluation.revision", "evaluation.column"),
        lambda _, evaluation: evaluation.has_data,
        "evaluation.prompts and mix are empty", "set evaluation.prompts",
        instead="evaluate on the rows of prompts.held_out"),
    ConditionalFields(
        ("evaluation.limit",), _has_texts, _NUMBERED, "set evaluation.prompts",
        instead="evaluate on them all"),
    ConditionalFields(
        ("evaluation.column",), _has_texts, _NUMBERED, "set evaluation.prompts"),
    ConditionalFields(
        ("evaluation.split", "evaluation.subset", "evaluation.revision"),
        lambda config, _: _beyond_files(config, derive(config).evaluation_prompts), "the rows come from files",
        instead="read all of them"),
    ConditionalFields(
        ("evaluation.mix.*.weight",), _never, "every prompt of each data set is evaluated once", "set limit of each",
        instead="weight each by its prompts"),
    ConditionalFields(
        ("evaluation.solved_at",),
        lambda config, _: any(isinstance(r, FunctionReward | HTTPReward) for r in config.rewards.values()),
        "none of `rewards` is a function or a service (verifiable rewards have their own `right`, and that of "
        "environments its own `solved_at`)", "add one"),
    ConditionalFields(
        ("episode_runner.*",), lambda config, _: bool(config.environments),
        "there are no environments, so no episodes are run", "add an environment"),
    ConditionalFields(
        ("episode_runner.column",), lambda config, _: len(config.environments) > 1,
        "there is one environment, which every row uses", "add another one"),
    ConditionalFields(
        ("episode_runner.gateway_host",),
        lambda config, _: any(each.path or each.command for each in config.environments.values()),
        "none of the environments can be an agent", "add one"),
    ConditionalFields(
        ("environments.*.processes",), lambda _, environment: not environment.isolated,
        "isolated=true gives each episode a process of its own", "set isolated to false"),
    ConditionalFields(
        ("environments.*.processes", "environments.*.isolated"), lambda _, environment: environment.command is None,
        "each episode of a command has a process of its own in any case"),
    ConditionalFields(
        ("environments.*.processes",), lambda _, environment: environment.processes <= environment.concurrency,
        "at most concurrency={section.concurrency} episodes are open, so no more processes than these start",
        "raise concurrency"),
    ConditionalFields(
        ("environments.*.python.programs",), lambda _, python: not python.keep_state,
        "keep_state=true gives each episode an interpreter of its own", "set keep_state to false"),
    ConditionalFields(
        ("environments.*.on_failure.retries",),
        lambda _, policy: "retry" in (policy.timeout, policy.environment, policy.agent),
        "on_failure begins no episode again (timeout={section.timeout}, environment={section.environment}, "
        "agent={section.agent})",
        "set one of them to retry"),
    *(ConditionalFields(
        (f"environments.*.timeout_s.{name}",),
        lambda _, limits, name=name: getattr(limits, name) <= limits.episode,  # type: ignore[misc]
        "the episode ends before, after timeout_s.episode={section.episode:g} s", "raise that")
      for name in ("reset", "step")),
    *(ConditionalFields(
        (f"environments.*.{source}.{name}",),
        lambda config, section, source=source, name=name, limit=limit: all(  # type: ignore[misc]
            getattr(each, source) is not section or getattr(section, name) < getattr(each.timeout_s, limit)
            for each in config.environments.values()),
        f"the environment's timeout_s.{limit} ends it before", "lower it, or raise that")
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
        "kv_cache_mb={section.cache_mb} sets the memory", "leave kv_cache_mb empty, on a GPU", of_place=True),
)
_EVALUATION = (
    ConditionalFields(
        (*(f"{section}.*" for section in TRAINING), "run.steps", "run.epochs", "run.auto_resume", "evaluation.every",
         "prompts.shuffle", "generator.sleep_level", "cluster.max_learner_restarts", "logging.tensorboard",
         "logging.ray_metrics", "logging.project", "logging.run_name", "logging.tags"), _never, _EVALUATES),
    ConditionalFields(
        ("logging.trackers", "logging.profile_step"), _never, _EVALUATES,
        instead="write nothing there"),
)

CONDITIONAL_FIELDS: Mapping[type[StageConfig], tuple[ConditionalFields, ...]] = {
    EvaluateConfig: _EVALUATION,
    StageConfig: _EVERY_STAGE,
    SFTConfig: _SUPERVISED + _SFT,
    RewardModelConfig: _SUPERVISED,
    ProcessRewardConfig: _SUPERVISED,
    PreferencesStageConfig: _GENERATING + _PREFERENCES,
    PPOConfig: _GENERATING + _PPO,
}
"""The rows of each stage and of those derived from it; the first that a field has no effect by says why."""


def without_effect(config: StageConfig) -> Iterator[IdleValue]:
    """The values of a configuration that somebody set to something else than the default, and that have no effect."""
    rows = [row for stage, rows in CONDITIONAL_FIELDS.items() if isinstance(config, stage) for row in rows]
    preset = config.algorithm.preset if isinstance(config, PPOConfig) else None
    yield from _of_other_types(config)
    found: list[IdleValue] = []
    for path, section, value in changed_fields(config):
        set_here = path.rpartition(".")[2] in section.model_fields_set
        if not set_here or gives(preset, path, value) or is_derived(config, path):  # nobody set it
            continue
        for row in rows:
            matches = path not in row.excluded and any(fnmatchcase(path, pattern) for pattern in row.fields)
            if matches and not row.act_if(config, section):
                reason = row.reason.format(config=config, section=section)
                reason += f", and the run would {row.instead}" if row.instead else ""
                found.append(IdleValue(path, value, reason, row.fix, bool(row.instead), row.of_place))
                break
    named_within = {each.path[:at] for each in found for at, letter in enumerate(each.path) if letter == "."}
    yield from (each for each in found if each.path not in named_within)


REFUSED_KEYS = {"sandbox": "hold no programs back"}
"""Keys that are refused where only another type has them: what the run would do instead."""


def _of_other_types(section: BaseModel, prefix: str = "") -> Iterator[IdleValue]:
    """Keys that were left out, because only other types of their union have them."""
    if isinstance(section, TypedSection):
        tag = type_tag(type(section))
        for key, (value, owners) in section.left_out.items():
            instead = f", and the run would {REFUSED_KEYS[key]}" if key in REFUSED_KEYS else ""
            yield IdleValue(f"{prefix}{key}", value, f"{prefix.rstrip('.')} is of type {tag}, and only "
                            f"{' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} {key}{instead}", "",
                            refused=key in REFUSED_KEYS)
    for name in type(section).model_fields:
        inner = getattr(section, name)
        if isinstance(inner, BaseModel):
            yield from _of_other_types(inner, f"{prefix}{name}.")
        for key, item in inner.items() if isinstance(inner, dict) else ():
            if isinstance(item, BaseModel):
                yield from _of_other_types(item, f"{prefix}{name}.{key}.")


def in_sentences(values: Iterable[IdleValue], origin_of: Callable[[str], str] = lambda _: "") -> list[str]:
    """One sentence for all values with the same reason.

    Args:
        origin_of: the origin of the value at a dotted path, " [file:line]"; "" if it is not known.
    """
    together: dict[tuple[str, str], list[IdleValue]] = {}
    for each in values:
        together.setdefault((each.reason, each.remedy), []).append(each)
    return [_sentence(reason, remedy, [f"{each.shown}{origin_of(each.path)}" for each in alike])
            for (reason, remedy), alike in together.items()]


def _sentence(reason: str, remedy: str, values: list[str]) -> str:
    has, it = ("has", "it") if len(values) == 1 else ("have", "them")
    return f"{', '.join(values)} {has} no effect: {reason}; leave {it} out" + (f", or {remedy}" if remedy else "")


def warn_of_idle_values(values: Iterable[IdleValue], origin_of: Callable[[str], str] = lambda _: "") -> None:
    """Log a single warning with a line for each reason; nothing without values. `origin_of` as in `in_sentences`."""
    if lines := in_sentences(values, origin_of):
        logging.getLogger(__name__).warning("\n  ".join(["the configuration has values without effect:", *lines]))


def check_effects(config: StageConfig) -> None:
    """No value has no effect such that the run would be something else than it says."""
    if refused := in_sentences(each for each in without_effect(config) if each.refused):
        raise ValueError("\n  ".join(refused))
