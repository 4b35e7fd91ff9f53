"""`rlhf-ray evaluate`: a model on its held-out prompts, in environments or by rewards alone, without training."""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from rlhf_ray.config.derived import Derived, derive
from rlhf_ray.config.stages import EvaluateConfig
from rlhf_ray.coordinator.chunk_calls import ChunkCalls
from rlhf_ray.coordinator.evaluation import Evaluation, Evaluator, Measured
from rlhf_ray.coordinator.rollout_source import PromptSource
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.models.model_families import DECODING, Use
from rlhf_ray.observability.faults import FaultLog
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.observability.run_directory import RunDirectory, read_json
from rlhf_ray.observability.sample_choice import Choice
from rlhf_ray.observability.sample_view import extremes, print_samples, samples_of
from rlhf_ray.observability.start_phases import START
from rlhf_ray.observability.tables import print_numbers
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.generator import Generator
from rlhf_ray.stages import ppo_preflight
from rlhf_ray.stages.one_go import run_in_one_go
from rlhf_ray.stages.ppo_roles import spawn_roles, start_roles, watched
from rlhf_ray.stages.prints import printing_roles, prints_shown
from rlhf_ray.stages.reward_preflight import scored_elsewhere, trained_on_other_ends
from rlhf_ray.stages.runtime import Runtime, open_runtime, write_left_out
from rlhf_ray.workers.health_monitor import Detector, HealthMonitor, as_started
from rlhf_ray.workers.role_groups import RoleGroups

_say = partial(print, "evaluate:", flush=True)


def run(config: EvaluateConfig, resume: bool = False) -> dict[str, Any]:
    """Measure the model; when resuming, what a finished evaluation wrote is kept.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    return run_in_one_go(config, resume, preflight, _run)


def preflight(config: EvaluateConfig) -> None:
    """Refuse a configuration that cannot work, before anything starts; raises the same errors as `run`."""
    uses = {Use.LANGUAGE, *DECODING} if derive(config).uses_reference else {Use.GENERATION}
    ppo_preflight.preflight(config, uses)


async def _run(config: EvaluateConfig, directory: RunDirectory) -> dict[str, Any]:
    began = time.perf_counter()
    derived = derive(config)
    with StopRequest(print, directory.files.hurry).listening():
        async with open_runtime(config, _say) as runtime:
            log = FaultLog(directory.faults, _say, _say, directory.term, directory.files.records)
            roles = spawn_roles(config, derived, runtime, HealthMonitor(config.cluster, log))
            held_out, detectors = await _started(config, derived, runtime, roles, directory)
            samples = held_out.rows * config.evaluation.samples_per_prompt
            with StageProgress("evaluate", samples, unit="samples") as progress:
                progress.note(START.ready())
                printing = printing_roles(config, roles)
                async with roles.health.at_work(detectors), prints_shown(printing, progress.note):
                    evaluation = await _measured(config, derived, roles, held_out, progress)
                    await _save_samples(config, derived, roles, held_out, directory, evaluation.chunks)
    directory.files.records.do(directory.write_json, directory.evaluation.name,
                               {"step": 0, "metrics": evaluation.metrics, "texts": evaluation.texts})
    return {"stage": "evaluate", "model": config.model.path, "prompts": held_out.rows, "samples": samples,
            "seconds": time.perf_counter() - began, **evaluation.metrics}


async def _started(
    config: EvaluateConfig, derived: Derived, runtime: Runtime, roles: RoleGroups, directory: RunDirectory
) -> tuple[PromptSource, list[Detector]]:
    """Start all workers; returns the prompts, and what notices that a worker is lost."""
    read, held_out = await start_roles(config, derived, runtime, roles, _say)
    assert held_out is not None
    await write_left_out(directory, read.left_out)
    for warning in [*trained_on_other_ends(config), *scored_elsewhere(config)]:
        _say(f"warning: {warning}")
    await roles.generators.call(0, Generator.compare_with_transformers).done()
    return held_out, await watched(roles, as_started, config.cluster.heartbeat_timeout_s)


async def _measured(
    config: EvaluateConfig, derived: Derived, roles: RoleGroups, held_out: PromptSource, progress: StageProgress
) -> Evaluation:
    done = 0

    def advanced(samples: int) -> None:
        nonlocal done
        done = min(progress.total, done + samples)  # samples that a lost node had are measured again
        progress.update(done)

    evaluator = Evaluator(config, derived, roles, ChunkCalls(roles, derived), held_out, progress.warn_once,
                          keeps_chunks=config.logging.samples != "off", advanced=advanced)
    return await evaluator.measure()


async def _save_samples(
    config: EvaluateConfig, derived: Derived, roles: RoleGroups, held_out: PromptSource, directory: RunDirectory,
    measured: Sequence[Measured],
) -> None:
    """Have the samples written to samples/, as those of step 0."""
    if not measured:
        return
    saved = config.logging.samples
    chunks = [each.chunk for each in measured]
    prompts = await held_out.read_for(key for chunk in chunks for key in chunk.keys)
    await roles.dispatcher(roles.assembler).value(
        Assembler.save_evaluated, str(directory.samples.absolute()), directory.term,
        saved if isinstance(saved, int) else None, derived.evaluates_the_policy_itself, prompts,
        rollouts=[chunk.rollout for chunk in chunks], rewards=[each.columns["rewards"] for each in measured],
        references=[each.columns.get("reference") for each in measured])


def print_evaluation(directory: RunDirectory, say: Callable[[str], None] = print) -> None:
    """Print the metrics of a finished evaluation, its best sample and its worst, and where its files are."""
    evaluation = read_json(directory.evaluation)
    print_numbers(evaluation["metrics"], sys.stdout)
    if directory.samples.is_dir():
        samples = samples_of(directory.path, Choice())
        print_samples(Console(highlight=False, soft_wrap=True), samples, extremes(samples, 1, 1))
        say(f"all samples: rlhf-ray samples {directory.path}")
    say(f"numbers: {directory.evaluation}")
