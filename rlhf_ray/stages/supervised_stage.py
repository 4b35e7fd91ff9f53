"""The stages `sft`, `reward-model` and `process-reward`: checks, workers, data, training, restarts, export."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlhf_ray.checkpoint.model_card import card_of
from rlhf_ray.checkpoint.store import Checkpoint
from rlhf_ray.cluster.session import Session
from rlhf_ray.config.combination_checks import check_combinations
from rlhf_ray.config.data import StepsConfig
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.coordinator.recovery import Geometry
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.data.stepwise_format import StepTokens
from rlhf_ray.errors import ConfigError, DiskStalled
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.model_families import Use, check_family
from rlhf_ray.models.router_balance import check_router
from rlhf_ray.observability.background_task import background_task
from rlhf_ray.observability.faults import FaultLog, note_restart
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.roles.data_readers import DataReader, DataSummary
from rlhf_ray.roles.supervised_learner import SupervisedLearner
from rlhf_ray.stages.attempts import repeat_attempts
from rlhf_ray.stages.epochs import count_rows, with_steps
from rlhf_ray.stages.geometry import supervised_geometry
from rlhf_ray.stages.preflight import (
    check_adapters,
    check_data,
    check_first_rows,
    check_fit,
    check_model,
    check_resume,
    check_row_length,
)
from rlhf_ray.stages.runtime import (
    Runtime,
    checkpoint_store,
    ending_note,
    fetch_uploaded,
    learner_notes,
    newest_checkpoint,
    open_runtime,
    owned_directory,
    probe_note,
    run_stage,
    start_learners,
    write_left_out,
)
from rlhf_ray.stages.supervised_loop import SupervisedConfig, SupervisedRun
from rlhf_ray.workers.detectors import HeartbeatDetector
from rlhf_ray.workers.health_monitor import HealthMonitor
from rlhf_ray.workers.learner_restart import LearnerRestart
from rlhf_ray.workers.node_drain import DrainWatch
from rlhf_ray.workers.role_table import RoleRow
from rlhf_ray.workers.worker_group import WorkerGroup


@dataclass(frozen=True)
class SupervisedStage:
    """The differences between the supervised stages."""

    config: SupervisedConfig
    name: str
    """Prefix of its metrics."""
    title: str
    """Shown to the user."""
    learner: type[SupervisedLearner]
    read: Callable[..., tuple[Any, Any, DataSummary]]
    """The method of `DataReader` that returns training rows, held-out rows and a summary."""
    reading: tuple[Any, ...] = ()
    """Arguments of `read` besides the section `data`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of this stage's learner besides the common ones."""
    start: str = ""
    """A sentence about the model that training starts from."""
    measured_first: bool = False
    """See `SupervisedRun`."""


def run_supervised(stage: SupervisedStage, resume: bool) -> dict[str, Any]:
    """Run a supervised stage to its end; returns its summary."""
    config = stage.config
    config = with_steps(config, partial(count_rows, config, stage.read, stage.reading),
                        config.training.batch_size)
    stage = replace(stage, config=config)
    geometry = supervised_geometry(config)
    with owned_directory(config, resume) as directory:
        if resume:
            fetch_uploaded(config, directory)
            check_resume(config, config.run.steps, geometry)
        return run_stage(config, directory, resume, lambda session: _run(stage, directory, session, resume, geometry))


async def _run(
    stage: SupervisedStage, directory: RunDirectory, session: Session, resume: bool, geometry: Geometry
) -> dict[str, Any]:
    config = stage.config
    files = directory.files
    began = time.perf_counter()
    store = checkpoint_store(config, directory, config.checkpoint.keep)
    start = await files.checkpoints.run(newest_checkpoint, store, resume, directory)
    with StageProgress(stage.title, config.run.steps, start.step if start else 0) as progress:
        if session.dashboard_line:
            progress.note(session.dashboard_line)
        stop = StopRequest(progress.warn, files.hurry)
        log = FaultLog(directory.faults, progress.warn, progress.note, directory.term, files.records)
        try:
            with stop.listening():
                if stage.start and start is None:
                    progress.note(stage.start)
                async with open_runtime(config, progress.note) as runtime:
                    learners, data, probe_seconds = await _prepare(stage, runtime, progress)
                    await write_left_out(directory, data.summary.left_out)
                    health = HealthMonitor(config.cluster, log)
                    health.register_learners([learners])
                    restart = LearnerRestart(config.cluster.max_learner_restarts, health, [learners], store,
                                             partial(_restart_learners, learners, data, config.cluster.start_timeout_s),
                                             progress.warn, stop, files)
                    detector = HeartbeatDetector(health.watched, config.cluster.heartbeat_timeout_s, health.silent)

                    async def attempt(metrics: MetricsWriter, start: Checkpoint | None, *_: Any) -> SupervisedRun:
                        run = SupervisedRun(config, stage.name, learners, directory, store, metrics, progress, stop,
                                            partial(card_of, config), data.summary.contents, geometry,
                                            stage.measured_first)
                        if start is not None:
                            await run.restore(start.path)
                            await files.records.run(note_restart, directory.faults, start.step, directory.term)
                        await run.train()
                        await run.export()
                        return run

                    drains = DrainWatch(stop.ask, progress.warn, [learners])
                    async with (background_task("the watch for drained nodes", drains.run, log.failed),
                                health.at_work([detector])):
                        run = await repeat_attempts(attempt, directory, config.logging, restart, start, resume)
        except DiskStalled:
            files.hurry()
            raise
    return {"stage": stage.name, "steps": run.step, "rows": data.summary.rows, "seconds": time.perf_counter() - began,
            "probe_seconds": {learners.role: round(probe_seconds, 3)}, **run.evaluation, **run.keeper.summary()}


async def _restart_learners(learners: WorkerGroup, data: "_TrainingData", timeout_s: float) -> None:
    """Start learners in new processes, and send them the rows."""
    await start_learners(learners, timeout_s)
    await data.send_to(learners)


@dataclass(frozen=True)
class _TrainingData:
    """The rows of a run, in the object store."""

    rows: Sequence[Any]
    """References to training rows and held-out rows."""
    summary: DataSummary

    async def send_to(self, learners: WorkerGroup) -> None:
        """Send all ranks the rows, which they use without a copy."""
        calls = learners.call_all(SupervisedLearner.take, *self.rows, self.summary.sizes, self.summary.weights)
        await asyncio.gather(*(call.done() for call in calls))


async def _prepare(
    stage: SupervisedStage, runtime: Runtime, progress: StageProgress
) -> tuple[WorkerGroup, _TrainingData, float]:
    """Start learners and read the data at the same time, then pass the data to the learners.

    Returns:
        the learners, the rows, and the seconds of the comparison with transformers.
    """
    config = stage.config
    reader = runtime.spawn("data_reader", DataReader, PlacementConfig(pool=config.learner.pool, cpus=0),
                         lambda _: {"model": config.model})
    learners = runtime.spawn_role(RoleRow("learner", stage.learner, shutdown=SupervisedLearner.leave), lambda rank: {
        "config": config.learner, "model": config.model, "rank": rank, "world": config.learner.workers,
        "seed": config.run.seed, "total_steps": config.run.steps, "batch_size": config.training.batch_size,
        "longest": config.data.max_tokens, **stage.options})
    progress.note(f"starting {len(learners)} learner(s) and reading {config.data.title}")
    if note := ending_note(config.model):
        progress.note(note)

    async def read() -> tuple[Any, DataSummary]:
        await reader.start()
        call = reader.call(0, stage.read, config.data, *stage.reading, outputs=3)
        summary: DataSummary = await call.output(2)
        for report in summary.reports:
            progress.note(report)
        return call, summary

    (call, summary), started = await asyncio.gather(read(), start_learners(learners, config.cluster.start_timeout_s))
    for note in learner_notes(learners.role, started[0]):
        progress.note(note)
    progress.note(probe_note(learners.role, started[0]))
    data = _TrainingData(call.refs[:2], summary)
    await data.send_to(learners)
    reader.kill()
    return learners, data, started[0]["probe_seconds"]


def check_supervised(config: SupervisedConfig, *, pairs: bool = False, steps: StepsConfig | None = None) -> None:
    """Refuse data, a model and numbers that do not fit together.

    Args:
        pairs: rows come in pairs, which a scalar head compares.
        steps: the format of steps, for process-labelled rows.

    Raises:
        DataError, ModelError, ConfigError: naming the field, the value and the fix.
    """
    check_combinations(config)
    check_data(config.data)
    check_model(config.model, "model")
    check_row_length(config.model, config.data.max_tokens, "data.max_tokens")
    check_family(config.model, "model", {Use.SCALAR if pairs else Use.LANGUAGE},
                 (config.data.max_tokens, "data.max_tokens"))
    check_adapters(config.learner, config.model, "learner", scalar=pairs)
    check_router(config.model, "learner", config.learner.router_aux_loss_coef)
    if steps is not None:
        StepTokens.of(steps, load_tokenizer(config.model))
    _check_budget(config, pairs)
    check_fit(config)
    check_first_rows(config.data, config.model, steps)


def _check_budget(config: SupervisedConfig, pairs: bool) -> None:
    """A micro-batch must hold the longest row, or pair of rows."""
    budget = config.learner.micro_batch_tokens
    longest = config.data.max_tokens
    if pairs and budget < 2 * longest:
        raise ConfigError(f"learner.micro_batch_tokens={budget} cannot hold a pair of two rows of "
                          f"data.max_tokens={longest}; raise it to at least twice that")
    if budget < longest:
        raise ConfigError(f"learner.micro_batch_tokens={budget} is less than data.max_tokens={longest}; raise it to "
                          "at least that")
