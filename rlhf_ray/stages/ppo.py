"""`rlhf-ray ppo`: proximal policy optimisation for rewards."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.cluster.heartbeat import HeartbeatDetector
from rlhf_ray.cluster.session import Session, write_timeline
from rlhf_ray.config.derived import derive, placements_of
from rlhf_ray.config.load import resolve
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.best_checkpoint import BestKeeper
from rlhf_ray.coordinator.chunk_calls import ChunkCalls
from rlhf_ray.coordinator.colocation import Phases
from rlhf_ray.coordinator.early_stop import EarlyStop
from rlhf_ray.coordinator.evaluation import Evaluation, Evaluator
from rlhf_ray.coordinator.generator_scaling import Scaling
from rlhf_ray.coordinator.health_monitor import Detector, HealthMonitor
from rlhf_ray.coordinator.learner_restart import LearnerRestart
from rlhf_ray.coordinator.live_gauges import LiveGauges, pools_of
from rlhf_ray.coordinator.live_status import live_status
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.coordinator.node_drain import watch_node_drains
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.coordinator.prompt_source import PromptSource
from rlhf_ray.coordinator.quarantine import Quarantine
from rlhf_ray.coordinator.recovery import LEDGER, Recovery
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.coordinator.run_state import RunState, kl_controller
from rlhf_ray.coordinator.step_profile import StepProfiler
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.coordinator.token_progress import TokenProgress
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.failpoints import armed
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.models.model_families import POLICY, Use, check_family
from rlhf_ray.observability.control_files import answering
from rlhf_ray.observability.faults import FaultLog
from rlhf_ray.observability.metrics import NOTHING, MetricsWriter
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.observability.prometheus import Gauges
from rlhf_ray.observability.run_directory import RunDirectory, SampleWriter
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.audit import counts, require_sound
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.ledger import Ledger, discard, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.roles.engines.vllm_adapter import refuse_open_serialization
from rlhf_ray.stages.evaluation_log import EvaluationLog
from rlhf_ray.stages.ppo_attempts import RunAttempts
from rlhf_ray.stages.ppo_roles import (
    check_pretraining_text,
    load_generator_count,
    restart_learners,
    save_generator_count,
    spawn_roles,
    start_roles,
    with_generators,
)
from rlhf_ray.stages.preflight import (
    check_adapters,
    check_context,
    check_data,
    check_data_file,
    check_first_rows,
    check_fit,
    check_model,
    check_resume,
)
from rlhf_ray.stages.reward_preflight import check_rewards
from rlhf_ray.stages.run_export import export_policy
from rlhf_ray.stages.runtime import fetch_uploaded, newest_checkpoint, open_runtime, owned_directory, run_stage


def run(config: PPOConfig, resume: bool = False) -> dict[str, Any]:
    """Run the stage to its end; returns what it wrote to summary.json.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    config, configured = resolve(config), config.generator.workers
    preflight(config)
    with owned_directory(config, resume) as directory:
        if resume:
            fetch_uploaded(config, directory)  # first: the number of generators may be saved only there
            config = with_generators(config, load_generator_count(directory, configured))
            check_resume(config, config.run.steps, _geometry(config))
        return run_stage(config, directory, resume,
                         lambda session: _run(config, directory, session, resume, configured))


def preflight(config: PPOConfig) -> None:
    """Refuse what cannot work before anything is started.

    Raises:
        ConfigError, ModelError, DataError: naming the field, the value and the fix.
    """
    refuse_open_serialization()
    armed()  # a misspelled failpoint would never be reached
    check_data(config.prompts, "prompts")
    derived = derive(config)
    held_out = derived.evaluation_prompts
    if held_out:
        check_data_file(held_out.location, "evaluation.prompts")
    check_pretraining_text(config)
    check_model(config.model, "model")
    longest, field = derived.longest_response, derived.longest_response_field
    rows = derived.longest_sample, f"prompts.max_tokens + {field}"
    check_family(config.model, "model", POLICY, rows)
    check_rewards(config)
    check_adapters(config.policy, config.model, "policy", scalar=False)
    if derived.starts_critic:
        check_family(derived.critic_model, f"critic.init={config.critic.init}", {Use.SCALAR}, rows)
        check_adapters(config.critic, derived.critic_model, "critic", scalar=True)
    check_context(config.model, config.prompts.max_tokens, longest, ("prompts.max_tokens", field))
    check_fit(config)
    for section in (config.prompts, held_out) if held_out else (config.prompts,):
        check_first_rows(section, config.model)


async def _run(
    config: PPOConfig, directory: RunDirectory, session: Session, resume: bool, configured: int
) -> dict[str, Any]:
    """`configured`: the number of generators in the configuration; a run that was scaled resumes with another
    number."""
    began, files = time.perf_counter(), directory.files
    store = CheckpointStore(directory.checkpoints, config.checkpoint.keep, term=directory.term)
    start = await files.checkpoints.run(newest_checkpoint, store, resume, directory)
    with StageProgress("PPO", config.run.steps, start.step if start else 0) as progress:
        if session.dashboard_url:
            progress.note(f"Ray dashboard at {session.dashboard_url}")
        stop = StopRequest(progress.warn, files.hurry)
        log = FaultLog(directory.faults, progress.warn, progress.note, directory.term, files.records)
        with stop.listening():
            async with open_runtime(config, progress.note) as runtime:
                roles = spawn_roles(config, runtime, HealthMonitor(config.cluster, log))
                if len(roles.generators) != configured:
                    progress.note(f"{len(roles.generators)} generators, as set by `rlhf-ray scale` (configured: "
                                  f"{configured})")
                prompts = await start_roles(config, runtime, roles, progress)
                weights = WeightSync(config.weights, roles, config.cluster.heartbeat_timeout_s,
                                     Phases(config.generator, config.policy, config.critic, roles))
                roles.keep_alive(weights.catch_up)
                attempts = RunAttempts(
                    config, directory, store, stop,
                    LearnerRestart(config.cluster.max_learner_restarts, roles, store,
                                   partial(restart_learners, config, runtime, roles, progress),
                                   progress.warn, files),
                    lambda metrics, evaluations, resume_at: wire(
                        config, roles, weights, prompts, directory, store, metrics, progress, stop, evaluations,
                        resume_at),
                )
                scaling = Scaling(config.cluster, roles, weights, partial(with_generators, config),
                                  partial(save_generator_count, directory, configured), progress.note, files)
                health, timeout_s = roles.health, config.cluster.heartbeat_timeout_s
                detectors: list[Detector] = [HeartbeatDetector(health.watched, timeout_s, health.silent),
                             TokenProgress(roles.dispatcher(roles.generators).scheduler, health, timeout_s)]
                frozen = [group for group in roles.groups() if not roles.trains(group.role)]
                async with (live_status(lambda: attempts.coordinator, directory, show_live(config, directory),
                                        log.failed),
                            watch_node_drains(stop, progress.warn, roles.learners(), frozen, log.failed),
                            health.at_work(detectors),
                            answering(directory, {"profile": attempts.profile, "scale": scaling.asked}, log.failed)):
                    coordinator = await attempts.run(start, resume)
                samples = await files.records.run(finalize_ledger, coordinator.pipeline.ledger, coordinator.open_keys())
    stopped = {"stopped_early": coordinator.stopped_early} if coordinator.stopped_early else {}
    first_rollout = roles.clock.first_end.get("phase:generate", roles.clock.now())
    return {
        "stage": "ppo", **stopped, "steps": coordinator.state.step, "samples": coordinator.state.samples,
        "seconds": time.perf_counter() - began, "seconds_loop": attempts.seconds, "probe_seconds": roles.probe_seconds,
        "first_rollout_at": round(time.time() - (roles.clock.now() - first_rollout), 3),
        "samples_per_second": attempts.samples / attempts.seconds, **attempts.evaluations.summary(),
        **coordinator.best.summary(), "checkpoint_pause_seconds": coordinator.recovery.longest_pause_s,
        "ledger": samples,
    }


def show_live(config: PPOConfig, directory: RunDirectory) -> Callable[[Coordinator], None]:
    """A function that sets a run's live metrics on Ray's Prometheus endpoint, if they are enabled."""
    if not config.logging.ray_metrics:
        return lambda _: None
    live, gauges = LiveGauges(pools_of(placements_of(config))), Gauges(directory.path.name)
    return lambda coordinator: gauges.set_live(live.read(coordinator))


def wire(
    config: PPOConfig, roles: RoleGroups, weights: WeightSync, prompts: tuple[PromptSource, PromptSource | None],
    directory: RunDirectory, store: CheckpointStore, metrics: MetricsWriter, progress: StageProgress,
    stop: StopRequest, evaluations: EvaluationLog, resume_at: int | None,
) -> Coordinator:
    """The coordinator of a run whose workers are ready, with everything it writes to."""
    files = directory.files
    training, held_out = prompts
    buffer_config = config.buffer
    state = RunState(kl_controller(config.algorithm.kl),
                     PromptCursor(training.sizes, config.run.seed, config.prompts.shuffle, config.prompts.weights),
                     early_stop=EarlyStop(config.early_stop))
    buffer = ReplayBuffer(
        buffer_config.capacity_samples or config.coordinator.samples_per_step,
        buffer_config.capacity_mb * 2**20 if buffer_config.capacity_mb else None,
        config.coordinator.max_staleness, buffer_config.lease_timeout_s,
    )
    ledger = _ledger(config, state.cursor, directory, store, resume_at, files.records)
    calls = ChunkCalls(roles, derive(config))
    pipeline = Pipeline(config, roles, calls, state, buffer, training, ledger,
                        _quarantine(config, ledger, directory, training, progress, files.records))
    evaluator = None
    if config.evaluation and held_out:
        evaluator = Evaluator(config, roles, calls, held_out, progress.warn_once)

    def note_evaluation(step: int, evaluation: Evaluation) -> None:
        metrics.write(step, {f"eval/{name}": value for name, value in evaluation.metrics.items()})
        evaluations.add(step, evaluation)
        progress.note(f"held-out at step {step}: "
                      + ", ".join(f"{name} {value:.3g}" for name, value in evaluation.metrics.items()))

    best = BestKeeper(config.checkpoint, directory, store, state.best,
                      lambda place: export_policy(coordinator, evaluations, place, directory.term))
    coordinator = Coordinator(
        config=config, roles=roles, state=state, buffer=buffer, calls=calls, pipeline=pipeline,
        weights=weights, evaluator=evaluator, best=best,
        recovery=Recovery(store, roles, state, buffer, _geometry(config), ledger, derive(config).old_logprobs, files),
        metrics=metrics, samples=SampleWriter(directory.samples, resume_at, directory.term), progress=progress,
        stop=stop, on_evaluation=note_evaluation, files=files, phases=weights.phases,
        profiler=StepProfiler(directory, roles, config.logging.profile_step, progress.note,
                              write_timeline if config.logging.task_events else None),
    )
    return coordinator


def _ledger(config: PPOConfig, cursor: PromptCursor, directory: RunDirectory, store: CheckpointStore,
            resume_at: int | None, thread: FileThread) -> Ledger:
    """A new ledger, or the one in the checkpoint of step `resume_at`."""
    facts = LedgerFacts.of(config.coordinator, cursor)
    if resume_at is None or resume_at == NOTHING:
        discard(directory.ledger)  # left by a run that failed before its first checkpoint
        return Ledger.create(directory.ledger, facts, directory.term, thread)
    return Ledger.resume(directory.ledger, store.path(resume_at) / LEDGER, facts, directory.term, thread)


def _quarantine(config: PPOConfig, ledger: Ledger, directory: RunDirectory, prompts: PromptSource,
                progress: StageProgress, thread: FileThread) -> Quarantine | None:
    """The record of prompts without a score; None when such a prompt ends the run."""
    if config.reward.on_failure == "fail":
        return None
    return Quarantine(ledger, directory.quarantine, config.reward.quarantine_limit, sum(prompts.sizes),
                      progress.warn_once, directory.term, thread)


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


def _geometry(config: PPOConfig) -> dict[str, int | str]:
    """What a resumed run must have in common with the run that saved."""
    critic = config.critic.backbone if config.algorithm.has_critic else "none"
    return {
        "algorithm.estimator": config.algorithm.estimator,
        "coordinator.prompts_per_step": config.coordinator.prompts_per_step,
        "coordinator.samples_per_prompt": config.coordinator.samples_per_prompt,
        "critic.backbone": critic,
    }
