"""Checks of combinations of sections, made before anything starts.

They refuse pools that are too small for their roles, settings with which a run would be something else than they say,
numbers with which it would wait without end, and hardware that a setting cannot use. Each check raises ValueError with
the fields, their values and what to change.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from rlhf_ray.config.bundle_assignment import BundleSlot, worker_bundles
from rlhf_ray.config.conditional_fields import check_effects
from rlhf_ray.config.data import NumberedRows
from rlhf_ray.config.derived import (
    buffer_capacity_mb,
    concurrency_of,
    derive,
    evaluation_metrics,
    placements_of,
    reward_sections,
    shares_one_gpu,
    training_sample,
)
from rlhf_ray.config.estimators import GDPOEstimator
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.learner import LearnerConfig, PPOLearnerConfig
from rlhf_ray.config.losses import CISPOLoss
from rlhf_ray.config.rewards import EnvironmentReward, ModelReward, ProcessReward
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.settled import value_at
from rlhf_ray.config.stages import (
    EvaluateConfig,
    PPOConfig,
    PreferencesStageConfig,
    ProcessRewardConfig,
    RewardModelConfig,
    SFTConfig,
    StageConfig,
)
from rlhf_ray.errors import ConfigError

BYTES_PER_TOKEN, BYTES_PER_VALUE = 25, 4
"""Bytes of a token in `records.Experience`: id, response mask, version and four numbers; one number more with a
reference, and one with a critic."""
MIB = 2**20
TAKEN_NAMES = {"cause": "episodes/cause/NAME", "reward": "eval/reward/NAME"}
"""Names that no environment may have, with the metrics that would be taken for its own (`episodes/ENVIRONMENT/NAME`,
`eval/ENVIRONMENT/NAME`)."""


def check_combinations(config: StageConfig) -> None:
    """Check that the sections of a stage fit together.

    Raises:
        ConfigError: the first problem, with its fields, their values and what to change.
    """
    try:
        for stage, checks in CHECKS.items():
            for check in checks if isinstance(config, stage) else ():
                if not (check in OF_TRAINING and isinstance(config, EvaluateConfig)):
                    check(config)
    except ValueError as problem:
        raise ConfigError(f"the configuration cannot run:\n  {problem}") from None


def check_pools(config: StageConfig) -> None:
    """Every role's pool must exist, with bundles of enough resources for a worker, and with room for all workers."""
    placed = placements_of(config)
    for role, p in placed.items():
        if p.pool not in config.pools:
            raise ValueError(f"{role}.pool={p.pool!r} is not one of the pools {sorted(config.pools)}; use one of "
                             "them, or define it")
        for kind in ("cpus", "gpus"):
            bundle = getattr(config.pools[p.pool], kind)
            if getattr(p, kind) > bundle:
                raise ValueError(
                    f"{role}.{kind}={getattr(p, kind):g} is more than a bundle of pools.{p.pool} has ({bundle:g}); "
                    f"a worker runs in one bundle, so raise pools.{p.pool}.{kind} or lower {role}.{kind}")
        if p.gpus > 1 and not isinstance(p, GenerationConfig):
            raise ValueError(f"{role}.gpus={p.gpus:g}: a worker of {role} uses one GPU; for several set {role}.workers "
                             f"to their number, and {role}.gpus to 1")
    for name, pool in config.pools.items():
        users = {r: p for r, p in placed.items() if p.pool == name}
        for kind in ("cpus", "gpus"):
            asked = sum(p.workers * getattr(p, kind) for p in users.values())
            given = pool.bundles * getattr(pool, kind)
            if asked > given + 1e-6:
                parts = ", ".join(f"{r} {p.workers}x{getattr(p, kind)}" for r, p in users.items())
                raise ValueError(
                    f"pools.{name} has {given:g} {kind}, but its roles need {asked:g} ({parts}); "
                    f"raise pools.{name}.{kind} or bundles, or lower the roles' {kind} or workers")
    _check_shared_gpus(placed, worker_bundles(config.pools, placed))


def _check_shared_gpus(placed: Mapping[str, PlacementConfig], slots: Sequence[BundleSlot]) -> None:
    """What may share a GPU with another worker of its role, and on what condition."""
    bundles = Counter((slot.role, slot.pool, slot.bundle) for slot in slots)
    for (role, pool, _), count in bundles.items():
        place = placed[role]
        if count == 1 or not 0 < place.gpus <= 0.5:  # two of more than half a GPU are on different ones
            continue
        if isinstance(place, LearnerConfig):
            raise ValueError(f"{count} ranks of {role} are in one bundle of pools.{pool}, with {role}.gpus="
                             f"{place.gpus:g}: they may be on one GPU, which NCCL refuses; lower {role}.workers, or "
                             "give each rank a bundle or a whole GPU")
        if isinstance(place, GenerationConfig) and place.kv_cache_mb is None:
            raise ValueError(f"{count} generators are in one bundle of pools.{pool}, with generator.gpus="
                             f"{place.gpus:g}: each would count the other's memory as its own when it measures what is "
                             "left for its cache; set generator.kv_cache_mb")


def check_derived(config: StageConfig) -> None:
    """What a saved configuration says was derived is a field."""
    for path in config.cluster.derived:
        try:
            value_at(config, path)
        except LookupError:
            raise ValueError(f"cluster.derived names {path!r}, which is no field of this configuration; the run itself "
                             "writes the list, so leave cluster.derived out") from None


def check_all_prompts(config: PreferencesStageConfig) -> None:
    """Pairs are sampled for all prompts, which have texts."""
    for field, part in config.prompts.named_parts():
        if part.numbers:
            raise ValueError(f"{field}.count={part.numbers.count} gives rows without texts, and this stage has no "
                             "environments that could begin with them; set a path")
    if config.prompts.held_out:
        raise ValueError(f"prompts.held_out={config.prompts.held_out:g} holds out prompts for an evaluation, but "
                         "this stage has none; set it to 0, and use data.held_out of `reward-model` to hold out "
                         "pairs")


def check_prefill(config: PPOConfig | PreferencesStageConfig) -> None:
    """A pass of a generator on a CPU holds a whole sequence: one that begins again with new weights is as long as its
    prompt and what was sampled, and vLLM cannot divide it there (`vllm_adapter.engine_arguments`)."""
    generation = config.generator
    longest = derive(config).longest_sample if isinstance(config, PPOConfig) else config.longest_sample
    if not generation.gpus and generation.prefill_tokens(longest) < longest:
        raise ValueError(f"generator.vllm.max_num_batched_tokens={generation.prefill_tokens(longest)} is less than a "
                         f"prompt and its response, {longest} tokens, which a generator on a CPU computes in one pass; "
                         "raise it, or remove it")


def check_target_kl(config: PPOConfig) -> None:
    """The KL that ends an update is measured from the policy before it."""
    a, bound = config.algorithm, config.coordinator.max_staleness
    several_steps = a.epochs * a.mini_batches > 1
    if a.target_kl is not None and a.old_logprobs == "generator" and bound and several_steps:
        raise ValueError(f"algorithm.target_kl={a.target_kl:g} limits how far an update moves the policy, but with "
                         "algorithm.old_logprobs=generator its KL is measured from the weights that sampled, up to "
                         f"coordinator.max_staleness={bound} versions before; set old_logprobs to policy")


def check_backbone(config: PPOConfig) -> None:
    """A critic that is the policy's model needs the policy's own pass, and is trained with it only."""
    if not derive(config).shares_backbone:
        return
    if config.algorithm.old_logprobs == "generator":
        raise ValueError("algorithm.old_logprobs=generator saves a forward pass of the policy, but "
                         "critic.backbone=policy needs that pass for the values; set it to policy")
    if config.algorithm.critic_warmup_steps:
        raise ValueError(f"algorithm.critic_warmup_steps={config.algorithm.critic_warmup_steps} trains only "
                         "the critic, but with critic.backbone=policy that would also change the policy; set it "
                         "to 0")


def check_reward_components(config: PPOConfig) -> None:
    """Components have names for metrics, and one has a weight."""
    for name in config.rewards:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(f"rewards: {name!r} is not a valid name of a component (it becomes part of metric "
                             "names); use letters, digits, _ and -")
    if not any(reward.weight for reward in config.rewards.values()):
        raise ValueError(f"rewards: the weight of each of {', '.join(config.rewards)} is 0, so every response would "
                         "score 0; give one of them another weight")


def check_critic_start(config: PPOConfig) -> None:
    """A critic can start from one reward model only."""
    models = [reward for reward in config.rewards.values() if isinstance(reward, ModelReward)]
    if derive(config).starts_critic and config.critic.init == "reward" and len(models) != 1:
        raise ValueError(f"critic.init=reward starts the critic from the only reward of type model, but "
                         f"rewards has {len(models) or 'none'}; use critic.init=policy, or one such reward")


def check_environments(config: PPOConfig) -> None:
    """An episode has room after its prompt, names are those of metrics, and what is computed of an episode is
    defined."""
    for name, environment in config.environments.items():
        if name in TAKEN_NAMES:
            raise ValueError(f"environments: {name!r} is also part of the names of other metrics "
                             f"({TAKEN_NAMES[name]}); give the environment another name")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(f"environments: {name!r} is not a valid name of an environment (it becomes part of metric "
                             "names); use letters, digits, _ and -")
        if environment.max_tokens <= config.prompts.max_tokens:
            raise ValueError(f"environments.{name}.max_tokens={environment.max_tokens} counts an episode's prompt too, "
                             f"and prompts may have prompts.max_tokens={config.prompts.max_tokens}: nothing could be "
                             "sampled after such a one; raise the first, or lower the second")
    of_environment = [name for name, reward in config.rewards.items() if isinstance(reward, EnvironmentReward)]
    if of_environment and not config.environments:
        raise ValueError(f"rewards.{of_environment[0]} is of type environment, but there are no environments; add one "
                         "(environments: {NAME: {path: file.py:name}}), or use another reward")
    if len(of_environment) > 1:
        raise ValueError(f"rewards.{of_environment[0]} and rewards.{of_environment[1]} are both of type environment, "
                         "which is one number; keep one, with the sum of their weights")
    _check_longest_episodes(config)
    _check_failures_trained_on(config)
    process = [name for name, reward in config.rewards.items() if isinstance(reward, ProcessReward)]
    if config.environments and process:
        raise ValueError(f"rewards.{process[0]} is of type process, which judges the steps of one response, and a "
                         "sample is an episode of several turns here; use another reward, or leave environments out")


def _check_longest_episodes(config: PPOConfig) -> None:
    """The length penalty is full at one length."""
    lengths = {name: each.max_tokens for name, each in config.environments.items()}
    if config.algorithm.overlong_buffer is not None and len(set(lengths.values())) > 1:
        each = ", ".join(f"environments.{name}.max_tokens={length}" for name, length in lengths.items())
        raise ValueError(f"algorithm.overlong_buffer={config.algorithm.overlong_buffer} counts from the longest "
                         f"episode, and environments differ in it ({each}); give all the same max_tokens, or leave "
                         "overlong_buffer out (null, with a preset that sets it)")


def _check_failures_trained_on(config: PPOConfig) -> None:
    """What is to be trained on is not left out of the losses."""
    for name, environment in config.environments.items() if config.algorithm.overlong_filter else ():
        policies = dict(environment.on_failure)
        causes = ["parse", "timeout", "environment"]
        if environment.command is not None or "agent" in environment.on_failure.model_fields_set:
            causes.append("agent")  # whether a path is an agent is not known yet
        for cause in causes:
            if policies[cause] in ("train", "zero"):
                raise ValueError(f"environments.{name}.on_failure.{cause}={policies[cause]} trains on episodes that "
                                 "algorithm.overlong_filter leaves out of the losses, since they did not complete; set "
                                 "it to mask, or leave overlong_filter out")


def check_groups(config: PPOConfig) -> None:
    """An estimator that compares a prompt's samples needs several."""
    if config.algorithm.compares_groups and config.coordinator.samples_per_prompt < 2:
        raise ValueError(
            f"algorithm.estimator={config.algorithm.estimator.type} compares a prompt's samples, but "
            f"coordinator.samples_per_prompt={config.coordinator.samples_per_prompt}; raise it to at least 2 (4 to "
            "16 are usual) or use gae, reinforce or reinforce_pp")


def check_dynamic_sampling(config: PPOConfig) -> None:
    """Only an estimator that compares a prompt's samples learns nothing from equal scores."""
    a = config.algorithm
    if a.dynamic_sampling is not None and not a.compares_groups:
        raise ValueError(
            f"algorithm.dynamic_sampling (max_batches={a.dynamic_sampling.max_batches}) leaves prompts out whose "
            f"samples have equal scores, and estimator={a.estimator.type} compares no samples of a prompt: their "
            "advantages need not be 0; use grpo, or leave it out")


def check_decoupled_rewards(config: PPOConfig) -> None:
    """GDPO compares each reward by itself: what is done to their sum would not reach the advantages."""
    a = config.algorithm
    if not isinstance(a.estimator, GDPOEstimator):
        return
    of_the_sum = {
        f"reward_normalisation={a.reward_normalisation}": a.reward_normalisation != "none",
        f"reward_clip={a.reward_clip}": a.reward_clip is not None,
        f"missing_eos_penalty={a.missing_eos_penalty}": bool(a.missing_eos_penalty),
        f"overlong_buffer={a.overlong_buffer}": a.overlong_buffer is not None,
        f"kl.placement=reward with kl.coef={a.kl.coef:g}": not a.kl_in_loss and a.kl.coef > 0,
    }
    if lost := [field for field, acts in of_the_sum.items() if acts]:
        remedy = "leave it out"
        if "kl.placement" in lost[0]:
            remedy = "set algorithm.kl.placement=loss"
        elif lost[0].startswith(("missing_eos", "overlong")):
            remedy = "leave it out, and give a reward of `rewards` for it"
        raise ValueError(f"algorithm.estimator=gdpo compares each reward by itself, and algorithm.{lost[0]} changes "
                         f"their sum, so it would be lost; {remedy}, or use estimator=grpo")


def check_held_out(config: PPOConfig) -> None:
    """An evaluation has prompts, and prompts are held out for an evaluation only."""
    evaluation, share = config.evaluation, config.prompts.held_out
    if evaluation and not evaluation.has_data and not share:
        raise ValueError("evaluation.prompts is empty and prompts.held_out=0, so the evaluation has no prompts; "
                         "set evaluation.prompts, or prompts.held_out (0.01 to 0.1 are usual)")
    if share and (evaluation is None or evaluation.has_data):
        fix = ("add one, e.g. evaluation.every=10" if evaluation is None else
               f"it uses evaluation.mix={evaluation.mix}; leave that empty" if evaluation.mix else
               f"it uses evaluation.numbered.count={evaluation.numbered.count}; leave that empty" if evaluation.numbered
               else
               f"it uses evaluation.prompts={evaluation.prompts!r}; leave that empty")
        raise ValueError(f"prompts.held_out={share:g} holds out prompts for an "
                         f"evaluation that does not use them: {fix}, or set prompts.held_out=0")


def check_numbered_rows(config: PPOConfig) -> None:
    """Rows without texts are for environments, and an evaluation has others than training."""
    held_out = derive(config).evaluation_prompts
    sections = [config.prompts, *([held_out] if held_out else [])]
    for field, part in (named for section in sections for named in section.named_parts()):
        if part.numbers and not config.environments:
            raise ValueError(f"{field}.count={part.numbers.count} gives rows without texts, which only an environment "
                             "can begin with; add one (environments: {NAME: ...}), or set a path")
    if isinstance(config, EvaluateConfig):
        return
    for field, part in held_out.named_parts() if held_out else ():
        for trained, other in config.prompts.named_parts():
            if part.numbers and other.numbers and _overlap(part.numbers, other.numbers):
                raise ValueError(f"{field}.first={part.numbers.first} gives {part.location}, of which {trained} has "
                                 f"some for training ({other.location}); leave first out, or set it to "
                                 f"{other.numbers.indices.stop}")


def _overlap(one: NumberedRows, other: NumberedRows) -> bool:
    """Whether rows of both are the same."""
    common = range(max(one.indices.start, other.indices.start), min(one.indices.stop, other.indices.stop))
    return len(common) > 0 and one.columns == other.columns


def check_ratio(config: PPOConfig) -> None:
    """CISPO's ratio, which is its only weight, sees how old samples are."""
    a, staleness = config.algorithm, config.coordinator.max_staleness
    if isinstance(a.loss, CISPOLoss) and a.old_logprobs == "policy" and staleness:
        raise ValueError("algorithm.loss=cispo with algorithm.old_logprobs=policy weights samples by the policy before "
                         f"the update, not by the weights that they came from, and with coordinator.max_staleness="
                         f"{staleness} these differ; leave old_logprobs at generator, or set max_staleness to 0")


def check_overlong_buffer(config: PPOConfig) -> None:
    """The length penalty begins within a response."""
    buffer = config.algorithm.overlong_buffer
    longest, field = config.generator.sampling.max_tokens, "generator.sampling.max_tokens"
    if config.environments:
        longest, field = training_sample(config)
    if buffer is not None and buffer > longest:
        raise ValueError(f"algorithm.overlong_buffer={buffer} is more than the maximum response length, "
                         f"{field}={longest}; lower it to a part of that")


def check_sampling(config: PPOConfig) -> None:
    """Training samples from a distribution that learners compute too, and a held-out response may end."""
    if config.evaluation and config.evaluation.sampling:
        _check_held_out_sampling(config.evaluation.sampling, config.evaluation.samples_per_prompt)
    s = config.generator.sampling
    if (field := _greedy(s)) is not None:
        raise ValueError(f"generator.sampling.{field} is greedy and explores nothing: the only token has the "
                         "probability 1, and the policy gets no gradient; use a positive temperature for training, and "
                         "keep more than one token")
    if s.repetition_penalty != 1:
        raise ValueError(f"generator.sampling.repetition_penalty={s.repetition_penalty:g} makes a token's probability "
                         "depend on which tokens came before it in a way that learners do not compute, so the "
                         "importance ratio would be wrong; set it to 1 (evaluation.sampling may have another)")
    for name in ("top_p", "min_p"):
        if getattr(s, name) != type(s).model_fields[name].default and not s.top_k:
            raise ValueError(f"generator.sampling.{name}={getattr(s, name):g} without top_k keeps any number of "
                             "tokens, and learners need the list of those that each token was sampled among; set "
                             "generator.sampling.top_k too (50 or 100 are usual), or leave it out (evaluation.sampling "
                             "may set it)")


def _check_held_out_sampling(sampling: SamplingConfig, samples: int) -> None:
    """What is set there and what is taken from training fit together, and several samples can differ."""
    try:
        SamplingConfig.model_validate(sampling.model_dump())
    except ValidationError as error:
        raise ValueError("evaluation.sampling, whose fields are those of generator.sampling if they are not set: "
                         + error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    if samples > 1 and (field := _greedy(sampling)) is not None:
        raise ValueError(f"evaluation.samples_per_prompt={samples} with evaluation.sampling.{field} samples the same "
                         "response each time; use one sample, or a distribution of several tokens")


def check_pairs(config: PreferencesStageConfig) -> None:
    """The two responses of a pair can differ."""
    if (field := _greedy(config.generator.sampling)) is not None:
        raise ValueError(f"generator.sampling.{field} is greedy and samples the same response twice; use a positive "
                         "temperature, and keep more than one token")


def _greedy(sampling: SamplingConfig) -> str | None:
    """The setting by which only the most likely token can be sampled; None without one."""
    settings = {"temperature": 0.0, "top_k": 1, "min_p": 1.0}
    return next((f"{name}={value:g}" for name, value in settings.items() if getattr(sampling, name) == value), None)


def check_best_metric(config: SFTConfig | RewardModelConfig | ProcessRewardConfig | PPOConfig) -> None:
    """The metric that selects the best step is measured."""
    metric = config.checkpoint.best_metric
    if metric is None:
        return
    if not isinstance(config, PPOConfig) and not config.data.held_out:
        raise ValueError(f"checkpoint.best_metric={metric} is measured on held-out rows, but data.held_out=0; set it "
                         "(0.01 to 0.1 are usual)")
    if isinstance(config, PPOConfig) and not config.evaluation:
        raise ValueError(f"checkpoint.best_metric={metric} is measured on held-out prompts, but there is no "
                         "evaluation; add one, e.g. evaluation.every=10, with prompts.held_out=0.01 or "
                         "evaluation.prompts")
    if isinstance(config, PPOConfig) and metric == "kl" and not derive(config).evaluates_the_policy_itself:
        raise ValueError("checkpoint.best_metric=kl, but KL is only measured if evaluation.sampling is the "
                         "distribution under training: temperature, top_p, top_k, min_p, repetition_penalty and "
                         "min_tokens of generator.sampling; change one of them")
    if metric not in (known := evaluation_metrics(config)):
        judge = " (gold is the score of logging.judge, which is empty)" if metric == "gold" else ""
        raise ValueError(f"checkpoint.best_metric={metric} is not a metric of this run's evaluations{judge}; name one "
                         f"of {', '.join(sorted(known))}")


def check_mini_batches(config: PPOConfig) -> None:
    """Mini-batches are of equal size."""
    c, mini_batches = config.coordinator, config.algorithm.mini_batches
    if c.samples_per_step % mini_batches:
        raise ValueError(
            f"coordinator.prompts_per_step x samples_per_prompt = {c.prompts_per_step} x {c.samples_per_prompt} = "
            f"{c.samples_per_step} is not divisible by algorithm.mini_batches={mini_batches}; change one of them")


def check_chunks(config: PPOConfig) -> None:
    """Chunks hold whole prompts, divide a batch if batches form in order of completion, and fit the concurrency."""
    loop, chunk = config.coordinator, config.generator.chunk
    if chunk % loop.samples_per_prompt:
        raise ValueError(f"generator.chunk={chunk} is not a multiple of coordinator.samples_per_prompt="
                         f"{loop.samples_per_prompt}; the samples of a prompt are generated in one chunk")
    if loop.max_staleness and loop.samples_per_step % chunk:
        raise ValueError(
            f"with coordinator.max_staleness={loop.max_staleness} batches form in order of completion, so the "
            f"{loop.samples_per_step} samples of a step must be a multiple of generator.chunk={chunk}; change one")
    in_flight = concurrency_of(loop, config.generator)
    if in_flight < chunk:
        raise ValueError(f"coordinator.concurrency={in_flight} is less than generator.chunk={chunk}, so no chunk "
                         "could start; raise it to at least that (several chunks keep a generator busy)")


def check_buffer(config: PPOConfig) -> None:
    """The buffer holds the bytes of the largest possible batch."""
    buffer, samples = config.buffer, config.coordinator.samples_per_step
    longest, fields = training_sample(config)
    masks = mask_bytes(config.generator.sampling, longest, longest if config.environments else None)
    batch_mb = -(-samples * (longest * experience_bytes_per_token(config) + masks) // MIB)
    capacity_mb = buffer_capacity_mb(buffer, config.cluster)
    if capacity_mb is not None and capacity_mb < batch_mb:
        name = "buffer.capacity_mb" if buffer.capacity_mb else "half of cluster.object_store_mb"
        raise ValueError(
            f"{name}={capacity_mb} may not hold one batch: {samples} samples of up to {longest} tokens "
            f"({fields}) are {batch_mb} MiB of experience, and a buffer smaller than a batch waits for ever; raise it, "
            "or lower coordinator.prompts_per_step or max_tokens")


def check_micro_batches(config: PPOConfig) -> None:
    """A micro-batch holds the longest row that a role receives, and a mini-batch a row for each rank."""
    derived, learners = derive(config), _learners(config)
    local = any(isinstance(reward, ModelReward | ProcessReward) for reward in reward_sections(config).values())
    scorers = [*(["reference"] if derived.starts_reference else []), *(["reward"] if local else [])]
    for role in (*learners, *scorers):
        budget = getattr(config, role).micro_batch_tokens
        longest, field = training_sample(config)
        if role not in learners or (role == "policy" and derived.policy_is_reference):  # held-out ones, too
            longest = derived.longest_sample
            field = re.sub(r"=\d+", "", derived.longest_sample_field)
        if budget < longest:
            raise ValueError(
                f"{role}.micro_batch_tokens={budget} is less than the longest sample, {field} = {longest}; raise it to "
                "at least that")
    if config.ptx and config.policy.micro_batch_tokens < config.ptx.max_tokens:
        raise ValueError(f"policy.micro_batch_tokens={config.policy.micro_batch_tokens} is less than "
                         f"ptx.max_tokens={config.ptx.max_tokens}; raise it to at least that, or lower "
                         "ptx.max_tokens")
    rows = config.coordinator.samples_per_step // config.algorithm.mini_batches
    for role, learner in learners.items():
        if rows < learner.workers:
            raise ValueError(
                f"a mini-batch of {rows} samples cannot be divided among {role}.workers={learner.workers}; "
                "use fewer mini_batches or workers")


def check_transport(config: PPOConfig) -> None:
    """A GPU transport has GPUs, and a placement that it supports."""
    generator, policy = config.generator, config.policy
    if config.weights.transport in ("auto", "object_store"):
        return
    asked = f"weights.transport={config.weights.transport}"
    if not generator.gpus or not policy.gpus:
        raise ValueError(
            f"{asked} copies weights from GPU to GPU, but generator.gpus={generator.gpus:g} and policy.gpus="
            f"{policy.gpus:g}; give both GPUs, or set weights.transport to object_store, which works on any hardware")
    if generator.engine == "in_process":
        raise ValueError(f"{asked} needs generator.engine=async (or auto), whose processes receive weights from a GPU")
    if config.weights.transport == "nccl" and (generator.gpus < 1 or policy.gpus < 1):
        raise ValueError(
            f"{asked} needs one GPU per process, because NCCL refuses two processes on one GPU, but generator.gpus="
            f"{generator.gpus:g} and policy.gpus={policy.gpus:g} share GPUs; set weights.transport to auto, or "
            "give each process whole GPUs")
    if config.weights.transport == "ipc" and not shares_one_gpu(config):
        raise ValueError(
            f"{asked} shares memory within one GPU, so there must be one generator on the GPU of the policy: place "
            "both in a pool of one bundle with one GPU, with fractions of at most 1 together (now generator.pool="
            f"{generator.pool}, {generator.workers} x {generator.gpus:g} gpus; policy.pool={policy.pool}, "
            f"{policy.workers} x {policy.gpus:g}); or set weights.transport to auto")


def check_phases(config: PPOConfig) -> None:
    """Sleeping and offloading between phases need rollouts and updates that do not overlap: otherwise no role is ever
    idle."""
    asked = [f"{role}.offload_between_phases=true" for role, learner in _learners(config).items()
             if learner.offload_between_phases]
    if config.generator.sleep_level:
        asked.append(f"generator.sleep_level={config.generator.sleep_level}")
    if asked and config.coordinator.max_staleness:
        raise ValueError(f"{asked[-1]} needs rollouts and updates to alternate, but with coordinator.max_staleness="
                         f"{config.coordinator.max_staleness} they overlap; set max_staleness to 0, or turn both "
                         "settings off")


def check_schedules(config: PPOConfig) -> None:
    """The warm-up leaves steps for the policy, and the adaptive coefficient stays positive."""
    a, samples = config.algorithm, config.coordinator.samples_per_step
    if config.run.epochs is None and a.warmup_steps >= config.run.steps:
        raise ValueError(
            f"algorithm.critic_warmup_steps={a.critic_warmup_steps} leaves no step of run.steps={config.run.steps} "
            "for the policy; lower it or raise run.steps")
    if a.kl.kind == "adaptive" and samples >= 5 * a.kl.horizon:
        raise ValueError(
            f"algorithm.kl.horizon={a.kl.horizon} is less than a fifth of the {samples} samples of "
            "a step, and one correction could turn the coefficient negative; use 10000 or more")


CHECKS: Mapping[type[StageConfig], tuple[Callable[[Any], None], ...]] = {
    StageConfig: (check_derived, check_pools, check_effects),
    SFTConfig: (check_best_metric,),
    RewardModelConfig: (check_best_metric,),
    ProcessRewardConfig: (check_best_metric,),
    PreferencesStageConfig: (check_all_prompts, check_pairs, check_prefill),
    PPOConfig: (
        check_backbone, check_target_kl, check_environments, check_reward_components, check_critic_start,
        check_dynamic_sampling, check_groups, check_decoupled_rewards, check_held_out, check_numbered_rows,
        check_ratio,
        check_overlong_buffer, check_sampling, check_prefill, check_best_metric, check_mini_batches, check_chunks,
        check_buffer, check_micro_batches, check_transport, check_phases, check_schedules,
    ),
}
"""The checks of a configuration and of those derived from it, in the order in which they are made."""
OF_TRAINING = frozenset({
    check_backbone, check_target_kl, check_critic_start, check_dynamic_sampling, check_groups, check_decoupled_rewards,
    check_ratio, check_overlong_buffer, check_best_metric, check_mini_batches, check_chunks, check_buffer,
    check_transport, check_phases, check_schedules,
})
"""Those of a PPO run that an evaluation alone does not need."""


def experience_bytes_per_token(config: PPOConfig) -> int:
    """Bytes of a token in the experience of this run, without sampling masks (`mask_bytes`)."""
    return BYTES_PER_TOKEN + BYTES_PER_VALUE * (config.algorithm.has_critic + derive(config).uses_reference)


def mask_bytes(sampling: SamplingConfig, longest: int, sampled: int | None = None) -> int:
    """Bytes of the sampling masks of the longest sample (`records.SampleRows.mask_sizes` and `mask_tokens`), of
    `longest` tokens, without tokens that are as likely as the k-th, and with one stop token.

    Args:
        sampled: tokens of it that the policy samples at most; those of one response if None.
    """
    if sampling.top_k:
        return 4 * (longest + (sampled or sampling.max_tokens) * sampling.top_k)
    return 4 * (longest + (sampled or sampling.min_tokens)) if sampling.min_tokens else 0


def _learners(config: PPOConfig) -> dict[str, PPOLearnerConfig]:
    """Sections of the learners that are started."""
    if isinstance(config, EvaluateConfig):
        return {}
    return {"policy": config.policy, **({"critic": config.critic} if derive(config).starts_critic else {})}
