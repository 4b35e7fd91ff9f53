"""Runs a stage, from Python or by its command."""

import sys
from contextlib import nullcontext
from html import escape
from importlib import import_module
from typing import Any

from rlhf_ray.cluster.worker_environment import worker_environment
from rlhf_ray.cluster.worker_templates import LIBRARIES, VLLM_LIBRARIES, WorkerTemplates, open_templates
from rlhf_ray.config.conditional_fields import warn_of_idle_values, without_effect
from rlhf_ray.config.derived import placements_of
from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.load import COMMANDS, module_of, resolve
from rlhf_ray.config.settled import is_set
from rlhf_ray.config.stages import PPOConfig, StageConfig
from rlhf_ray.errors import ConfigError, StoppedEarly
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.start_phases import START
from rlhf_ray.planning.local_machine import gpus_here
from rlhf_ray.roles.engines.vllm_adapter import generator_environment
from rlhf_ray.stages.inputs import with_inputs


def run(config: StageConfig, resume: bool = False) -> dict[str, Any]:
    """Run a stage to its end, as its command does: with checks before anything starts, progress on standard output, and
    all files in `config.run.dir`. A notebook shows the report below the progress. `run.auto_resume` has no effect here:
    it starts the command again.

    Args:
        config: of the stage, which its class determines. Rows and functions in it are written to `inputs/` in
            `run.dir`.
        resume: go on from the newest checkpoint in `run.dir`, or begin if there is none. A run that was given objects
            is resumed by the same call.

    Returns:
        The contents of `summary.json`.

    Raises:
        RLHFError: the run failed, or was refused; the message says what to do. Ctrl-C, and the interruption of a cell,
            save a checkpoint and raise `RunInterrupted`.
    """
    command = next((command for command, kind in COMMANDS.items() if type(config) is kind), None)
    if command is None:
        kinds = ", ".join(kind.__name__ for kind in COMMANDS.values())
        raise ConfigError(f"run() got a {type(config).__name__}; give it one of {kinds}")
    placed = is_set(config, "pools")  # otherwise some values may act where the roles are placed later
    warn_of_idle_values(each for each in without_effect(config) if placed or not each.of_place)
    config = with_inputs(config, resume)
    if isinstance(config, PPOConfig):  # others may still need GPUs that the machines' planner gives them first
        config = resolve(config)
    return _run(command, config, resume)


def run_loaded(command: str, config: StageConfig, resume: bool) -> dict[str, Any]:
    """Run the stage of a command with a configuration of `load`, which is resolved; the rest as in `run`."""
    return _run(command, with_inputs(config, resume), resume)


def _run(command: str, config: StageConfig, resume: bool) -> dict[str, Any]:
    directory = RunDirectory(config.run.dir)
    try:
        with open_templates() if starts_cluster(config) else nullcontext() as templates:
            START.restart()
            START.begin("libraries", "loading libraries")
            if templates is not None:
                start_templates(config, templates)  # which import while this process does
            stage = import_module(f"rlhf_ray.stages.{module_of(command)}")
            summary: dict[str, Any] = stage.run(config, resume=resume)
    except StoppedEarly:
        _show_report(directory)
        raise
    _show_report(directory)
    return summary


def starts_cluster(config: StageConfig) -> bool:
    """Whether the stage starts a cluster of its own; otherwise its workers may be on other machines."""
    ray = sys.modules.get("ray")
    return config.cluster.address is None and (ray is None or not ray.is_initialized())


def start_templates(config: StageConfig, templates: WorkerTemplates) -> None:
    """Start what the workers of a stage with its own cluster are forked from; nothing if they may be on GPUs."""
    if gpus_here():
        return
    for placement in placements_of(config).values():
        if isinstance(placement, GenerationConfig):
            templates.command(worker_environment(placement, generator_environment(placement)), VLLM_LIBRARIES)
        else:
            templates.command(worker_environment(placement, {}), LIBRARIES)


def _show_report(directory: RunDirectory) -> None:
    """Show the report in the notebook that this is called in, if it is one."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel") or not directory.report.is_file():
        return
    from IPython.display import HTML, display

    page = escape(directory.report.read_text(encoding="utf-8"))
    display(HTML(f'<iframe srcdoc="{page}" title="report of {escape(str(directory.path))}" '
                 'style="width: 100%; height: 48em; border: 0"></iframe>'))
