"""The workers of a PPO run: their number, arguments, start and restart, and their pretraining text."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from rlhf_ray.config.adapter_publication import why_merged
from rlhf_ray.config.bundle_assignment import Bundles, assigned
from rlhf_ray.config.combination_checks import check_pools, check_transport
from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.derived import Derived, placements_of, reward_sections
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.stages import EvaluateConfig, PPOConfig
from rlhf_ray.coordinator.canary import Canary
from rlhf_ray.coordinator.rollout_source import PromptSource, reopened
from rlhf_ray.data.contents import Contents
from rlhf_ray.errors import ConfigError
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.generator_parity import SAMPLED, given_rows
from rlhf_ray.models.model_families import Use, check_family, model_family
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.start_phases import START
from rlhf_ray.roles.data_readers import DataReader, PromptReader
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.stages.environment_preflight import in_words
from rlhf_ray.stages.preflight import check_data, check_row_length
from rlhf_ray.stages.runtime import Runtime, ending_note, learner_notes, probes_note, start_learners
from rlhf_ray.workers.detectors import HeartbeatDetector, TokenProgress
from rlhf_ray.workers.health_monitor import Detector, HealthMonitor, Ready
from rlhf_ray.workers.peer_tables import PeerTables
from rlhf_ray.workers.role_groups import RoleGroups
from rlhf_ray.workers.role_table import rows_of
from rlhf_ray.workers.worker_group import WorkerGroup


def spawn_roles(
    config: PPOConfig, derived: Derived, runtime: Runtime, health: HealthMonitor | None = None
) -> RoleGroups:
    """Spawn all processes of the run; they load in parallel once `start_roles` calls them."""
    groups = {}
    for row in rows_of(config, derived):
        arguments = cache(partial(row.cls.arguments, config, derived))  # a rank's next process has those of its first
        groups[row.section] = runtime.spawn_role(row, arguments)
    return RoleGroups(groups, health or HealthMonitor(config.cluster))


async def start_roles(
    config: PPOConfig, derived: Derived, runtime: Runtime, roles: RoleGroups, note: Callable[[str], None]
) -> tuple[PromptSource, PromptSource | None]:
    """Load all models and read the prompts at the same time.

    Generators that share their GPU start first: vLLM measures the free memory while it starts, and fails when other
    processes allocate some meanwhile.

    Returns:
        training prompts, and evaluation prompts if configured. An evaluation alone with data of its own reads these
        only, and returns them twice.
    """
    reader = runtime.spawn("prompt_reader", PromptReader, PlacementConfig(pool=config.assembler.pool, cpus=0),
                         lambda _: {"model": config.model, "directory": Path(config.run.dir).absolute(),
                                    "rewards": reward_sections(config)})
    workers = sum(map(len, roles.groups()))
    if config.policy.lora:
        reason = why_merged(config, model_family(config.model))
        note(f"publications contain weights with the adapters merged in, because {reason}" if reason else
                      "publications contain the adapters alone")
    START.begin("workers", f"starting {workers} workers: "
                + ", ".join(f"{len(g)} {g.role}" for g in roles.groups()), note)
    if ending := ending_note(config.model):
        note(ending)
    limit = config.cluster.start_timeout_s
    learners = roles.learners()
    frozen = [group for group in roles.groups() if group not in learners]
    if 0 < config.generator.gpus < 1:
        await roles.generators.start(timeout_s=limit)
        frozen.remove(roles.generators)
    sources, started, of_frozen, _ = await asyncio.gather(
        _read_prompts(config, derived.evaluation_prompts, reader, roles, note),
        asyncio.gather(*(start_learners(group, limit) for group in learners)),
        asyncio.gather(*(group.start(timeout_s=limit) for group in frozen)),
        hand_out_pretraining_text(config, runtime, roles, note),
    )
    for group, sizes in zip(learners, started, strict=True):
        for sentence in learner_notes(group.role, sizes[0]):
            note(sentence)
    for group, reports in zip(frozen, of_frozen, strict=True):
        if roles.runners is not None and group.role == roles.runners.role:
            for name, facts in reports[0].items():
                note(in_words(name, facts))
    probed = {group.role: reports for group, reports in zip([*learners, *frozen], [*started, *of_frozen], strict=True)
              if reports[0] and "probe_seconds" in reports[0]}
    roles.probe_seconds.update({role: round(max(one["probe_seconds"] for one in reports), 3)
                                for role, reports in probed.items()})
    if probed:
        note(probes_note(reports[0] for reports in probed.values()))
    return sources


async def watched(roles: RoleGroups, catch_up: Ready, timeout_s: float) -> list[Detector]:
    """From now on replace the workers that are lost; returns what notices them. Episode runners are given their handles
    to generators.

    Args:
        catch_up: as in `RoleGroups.keep_alive`.
        timeout_s: `cluster.heartbeat_timeout_s`.
    """
    generators = roles.dispatcher(roles.generators)
    detectors: list[Detector] = [
        HeartbeatDetector(roles.health.watched, timeout_s, roles.health.silent),
        TokenProgress(generators.scheduler, roles.health, timeout_s),
    ]
    if roles.runners is None:
        roles.keep_alive(catch_up)
        return detectors
    peers = PeerTables(roles.dispatcher(roles.runners), generators, timeout_s)
    await peers.send_first()
    roles.keep_alive(catch_up, peers.introduce)
    return [*detectors, peers]


def canary_of(config: PPOConfig, derived: Derived, roles: RoleGroups) -> Canary | None:
    """The comparison of generators and learner; None if rows have no room for two tokens and one that vLLM samples."""
    longest = derived.longest_sample - 1
    shape = pretrained_config(config.model)
    if longest < 2:
        return None
    rows = given_rows(shape, longest)
    prompt = longest + 1 - SAMPLED
    long_row = given_rows(shape, prompt, (prompt,)) if prompt > max(rows.lengths) else None
    return Canary(roles, rows, config.model.path, long_row, config.run.seed)


async def restart_learners(config: PPOConfig, runtime: Runtime, roles: RoleGroups, note: Callable[[str], None]) -> None:
    """Start learners whose processes are new, and give them the pretraining text."""
    limit = config.cluster.start_timeout_s
    await asyncio.gather(*(start_learners(group, limit) for group in roles.learners()))
    await hand_out_pretraining_text(config, runtime, roles, note)


async def _read_prompts(
    config: PPOConfig, evaluation_prompts: PromptsConfig | None, group: WorkerGroup, roles: RoleGroups,
    note: Callable[[str], None],
) -> tuple[PromptSource, PromptSource | None]:
    reader = roles.dispatcher(group)
    await group.start()
    sections = {"training": config.prompts}
    if evaluation_prompts is not None:
        sections["evaluation"] = evaluation_prompts
        if isinstance(config, EvaluateConfig):
            del sections["training"]
    contents: dict[str, Contents] = {}
    roles.health.register(reader.scheduler, reopened(group, sections, contents))
    sources = {}
    for table, section in sections.items():
        sources[table] = await PromptSource.open(reader, table, section)
        contents[table] = sources[table].contents
        for report in sources[table].reports:
            note(report)
    if evaluation_prompts is not None:
        held_out = sources["evaluation"]
        return sources.get("training", held_out), held_out
    training = sources["training"]
    return training, training.first_held_out(config.evaluation.limit) if config.evaluation else None


def check_pretraining_text(config: PPOConfig) -> None:
    """Refuse missing text, and rows longer than the model's context or than packed passes allow.

    Raises:
        DataError, ModelError: naming the field, the value and the fix.
    """
    if config.ptx is None:
        return
    check_data(config.ptx)
    check_row_length(config.model, config.ptx.max_tokens, "ptx.max_tokens")
    check_family(config.model, "model", {Use.LANGUAGE}, (config.ptx.max_tokens, "ptx.max_tokens"))


async def hand_out_pretraining_text(
    config: PPOConfig, runtime: Runtime, roles: RoleGroups, note: Callable[[str], None]
) -> None:
    """Give the policy's ranks the text, which lies in the object store; they use it without a copy."""
    if config.ptx is None:
        return
    reader = runtime.spawn("text_reader", DataReader, PlacementConfig(pool=config.policy.pool, cpus=0),
                         lambda _: {"model": config.model})
    await reader.start()
    call = reader.call(0, DataReader.pretraining_text, config.ptx, outputs=2)
    summary = await call.output(1)
    for report in summary.reports:
        note(report)
    note(f"{summary.rows} rows of pretraining text, of at most {config.ptx.max_tokens} tokens")
    await asyncio.gather(*(c.done() for c in roles.policy.call_all(
        PolicyLearner.take_pretraining_text, config.ptx, call.ref, summary.sizes, summary.contents)))
    reader.kill()


def save_generator_count(directory: RunDirectory, configured: int, generators: int) -> None:
    """Save the present number of generators; `configured` is the number in the configuration of this start."""
    directory.write_json(directory.generators.name, {"generators": generators, "configured": configured})


def load_generator_count(directory: RunDirectory, configured: int) -> int:
    """The number of generators that a resumed run starts with: the one `rlhf-ray scale` set, unless the configuration
    was changed since."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(directory.generators.read_text())
        if saved["configured"] == configured:
            return int(saved["generators"])
    return configured


def with_generators(config: PPOConfig, count: int) -> PPOConfig:
    """The configuration with another number of generators, and the bundles that they need added to their pool.

    Raises:
        ConfigError: so many cannot share a GPU, or not with this `weights.transport`.
    """
    name = config.generator.pool
    scaled = config.model_copy(update={"generator": config.generator.model_copy(update={"workers": count})})
    users = {role: place for role, place in placements_of(scaled).items() if place.pool == name}
    pool = config.pools[name]
    while not isinstance(assigned(pool, users), Bundles):
        pool = pool.model_copy(update={"bundles": pool.bundles + 1})
    scaled = scaled.model_copy(update={"pools": {**config.pools, name: pool}})
    try:
        check_pools(scaled)
        check_transport(scaled)
    except ValueError as problem:
        raise ConfigError(f"{count} generators cannot run: {problem}. A setting can be changed with --resume") from None
    return scaled
