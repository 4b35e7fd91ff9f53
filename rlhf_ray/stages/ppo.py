"""`rlhf-ray ppo`, `grpo`, `rloo` and `reinforce`: a policy is trained by rewards."""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing, nullcontext
from functools import partial
from typing import Any

from rlhf_ray.cluster.session import Session
from rlhf_ray.config.derived import Derived, derive
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.colocation import Phases
from rlhf_ray.coordinator.episode_watch import EpisodeWatch
from rlhf_ray.coordinator.live_gauges import LiveGauges, pools_of
from rlhf_ray.coordinator.live_status import live_status
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.coordinator.recovery import Geometry
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.observability.background_task import background_task
from rlhf_ray.observability.control_files import answering
from rlhf_ray.observability.faults import FaultLog
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.observability.prometheus import Gauges
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.audit import counts, require_sound
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.stages.epochs import count_prompts, with_steps
from rlhf_ray.stages.geometry import ppo_geometry
from rlhf_ray.stages.ppo_attempts import RunAttempts
from rlhf_ray.stages.ppo_builder import CoordinatorBuilder
from rlhf_ray.stages.ppo_preflight import preflight
from rlhf_ray.stages.ppo_roles import (
    canary_of,
    load_generator_count,
    restart_learners,
    save_generator_count,
    spawn_roles,
    start_roles,
    watched,
    with_generators,
)
from rlhf_ray.stages.preflight import check_resume, with_gpu_settings
from rlhf_ray.stages.prints import printing_roles, prints_shown
from rlhf_ray.stages.reward_preflight import scored_elsewhere, trained_on_other_ends
from rlhf_ray.stages.runtime import (
    checkpoint_store,
    fetch_uploaded,
    newest_checkpoint,
    open_runtime,
    owned_directory,
    run_stage,
    write_left_out,
)
from rlhf_ray.workers.generator_scaling import Scaling
from rlhf_ray.workers.health_monitor import HealthMonitor
from rlhf_ray.workers.learner_restart import LearnerRestart
from rlhf_ray.workers.node_drain import DrainWatch

__all__ = ["finalize_ledger", "preflight", "run", "show_live"]


def run(config: PPOConfig, resume: bool = False) -> dict[str, Any]:
    """Run the stage to its end with a resolved configuration; returns what it wrote to summary.json.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    config = with_gpu_settings(config, resume)
    configured = config.generator.workers
    preflight(config)
    bounded = config.run.epochs is not None and config.algorithm.dynamic_sampling is not None
    config = with_steps(config, lambda: count_prompts(config), config.coordinator.prompts_per_step)
    most_prompts = config.run.steps * config.coordinator.prompts_per_step if bounded else None
    derived = derive(config)
    geometry = ppo_geometry(config, derived)
    with owned_directory(config, resume) as directory:
        if resume:
            fetch_uploaded(config, directory)  # first: the number of generators may be saved only there
            config = with_generators(config, load_generator_count(directory, configured))
            check_resume(config, config.run.steps, geometry)
        return run_stage(config, directory, resume,
                         lambda session: _run(config, derived, directory, session, resume, configured, geometry,
                                              most_prompts))


async def _run(
    config: PPOConfig, derived: Derived, directory: RunDirectory, session: Session, resume: bool, configured: int,
    geometry: Geometry, most_prompts: int | None,
) -> dict[str, Any]:
    """
    Args:
        configured: the number of generators in the configuration; a run that was scaled resumes with another number.
        most_prompts: as in `RunState`.
    """
    began = time.perf_counter()
    files = directory.files
    store = checkpoint_store(config, directory, config.checkpoint.keep)
    start = await files.checkpoints.run(newest_checkpoint, store, resume, directory)
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(
            StageProgress(config.algorithm.method, config.run.steps, start.step if start else 0))
        if session.dashboard_line:
            progress.note(session.dashboard_line)
        stop = StopRequest(progress.warn, files.hurry)
        stack.enter_context(stop.listening())
        runtime = await stack.enter_async_context(open_runtime(config, progress.note))

        log = FaultLog(directory.faults, progress.warn, progress.note, directory.term, files.records)
        health = HealthMonitor(config.cluster, log)
        roles = spawn_roles(config, derived, runtime, health)
        if len(roles.generators) != configured:
            progress.note(f"{len(roles.generators)} generators, as set by `rlhf-ray scale` (configured: {configured})")
        prompts, held_out = await start_roles(config, derived, runtime, roles, progress.note)
        await write_left_out(directory, [*prompts.left_out, *(held_out.left_out if held_out else [])])
        for warning in [*_repeats(config, sum(prompts.sizes)), *trained_on_other_ends(config),
                        *scored_elsewhere(config)]:
            progress.warn(warning)
        timeout_s = config.cluster.heartbeat_timeout_s
        phases = Phases(config.generator, config.policy, config.critic, roles)
        canary = canary_of(config, derived, roles)
        if canary is not None:
            gap = await canary.compare_at_start()
            progress.note(f"generators and learner compute the same model: log-probabilities differ by {gap:.2g} nats")
        weights = WeightSync(config.weights, roles, timeout_s, phases, canary,
                             None if config.coordinator.max_staleness else timeout_s)
        detectors = await watched(roles, weights.catch_up, timeout_s)
        learner_restart = LearnerRestart(config.cluster.max_learner_restarts, health, roles.learners(), store,
                                         partial(restart_learners, config, runtime, roles, progress.note),
                                         progress.warn, stop, files)
        episodes = None if roles.runners is None else EpisodeWatch(roles.runners)
        builder = CoordinatorBuilder(config, derived, roles, weights, prompts, held_out, directory, store, geometry,
                                     progress, stop, most_prompts, episodes)
        attempts = RunAttempts(config.logging, directory, learner_restart, builder.build)
        scaling = Scaling(config.cluster, roles, weights, partial(with_generators, config),
                          partial(save_generator_count, directory, configured), progress.note, files)
        drains = DrainWatch(stop.ask, progress.warn, roles.learners(),
                            [group for group in roles.groups() if not roles.trains(group.role)])

        async with (live_status(lambda: attempts.coordinator, directory, show_live(config, directory), log.failed),
                    background_task("the watch for drained nodes", drains.run, log.failed),
                    health.at_work(detectors),
                    answering(directory, {"profile": attempts.profile, "scale": scaling.asked}, log.failed),
                    prints_shown(printing_roles(config, roles), progress.note),
                    nullcontext() if episodes is None else background_task("the watch over episodes", episodes.run)):
            coordinator = await attempts.run(start, resume)
        samples = await files.records.run(finalize_ledger, coordinator.pipeline.ledger, coordinator.open_keys())
    return {**_summary(coordinator, attempts, time.perf_counter() - began), "ledger": samples}


def _summary(coordinator: Coordinator, attempts: RunAttempts, seconds: float) -> dict[str, Any]:
    """The contents of summary.json without the ledger's counts; `seconds` is the duration of the whole run."""
    config = coordinator.config
    roles = coordinator.roles
    stopped = {"stopped_early": coordinator.stopped_early} if coordinator.stopped_early else {}
    generated = "phase:generate" if roles.runners is None else "phase:episodes"
    first_rollout = roles.clock.first_end.get(generated, roles.clock.now())
    return {
        "stage": "ppo", "method": config.algorithm.method, **stopped,
        **({"prompts_used": True} if coordinator.prompts_used else {}),
        "steps": coordinator.state.step, "samples": coordinator.state.samples,
        "seconds": seconds, "seconds_loop": attempts.seconds, "probe_seconds": roles.probe_seconds,
        "first_rollout_at": round(time.time() - (roles.clock.now() - first_rollout), 3),
        "samples_per_second": attempts.samples / attempts.seconds, **attempts.evaluations.summary(),
        **coordinator.best.summary(), "checkpoint_pause_seconds": coordinator.recovery.longest_pause_s,
    }


def _repeats(config: PPOConfig, rows: int) -> list[str]:
    """A warning if the data have fewer rows than a step takes."""
    wanted = config.coordinator.prompts_per_step
    if wanted <= rows:
        return []
    return [f"a step takes {wanted} prompts (coordinator.prompts_per_step), and the data have {rows}: prompts are "
            "used several times in it"]


def show_live(config: PPOConfig, directory: RunDirectory) -> Callable[[Coordinator], None]:
    """A function that sets a run's live metrics on Ray's Prometheus endpoint, if they are enabled."""
    if not config.logging.ray_metrics:
        return lambda _: None
    live = LiveGauges(pools_of(config))
    gauges = Gauges(directory.path.name)
    return lambda coordinator: gauges.set_live(live.read(coordinator))


def finalize_ledger(ledger: Ledger, unused: Sequence[SampleKey]) -> dict[str, int]:
    """Close the ledger and return the number of samples by outcome. Every sample must be accounted for.

    Args:
        unused: keys of the samples that were in progress or waiting when the run ended. Other open samples count as
            lost.

    Raises:
        LedgerError: some samples are not accounted for: the run is faulty, whatever it wrote.
    """
    ledger.leave_unused(unused, "the run ended before its turn")
    ledger.close()
    with closing(open_for_reading(ledger.path)) as db:
        require_sound(db, ended=True)
        return counts(db)
