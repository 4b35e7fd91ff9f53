"""Runs a stage from Python."""

from importlib import import_module
from typing import Any

from rlhf_ray.config.load import COMMANDS, module_of
from rlhf_ray.config.stages import StageConfig


def run(config: StageConfig, resume: bool = False) -> dict[str, Any]:
    """Run a stage to its end, as its command does: with checks before anything starts, progress on standard output, and
    all files in `config.run.dir`. `run.auto_resume` has no effect here: it starts the command again.

    Args:
        config: of the stage, which its class determines.
        resume: go on from the newest checkpoint in `run.dir`, or begin if there is none.

    Returns:
        The contents of `summary.json`.

    Raises:
        RLHFError: the run failed, or was refused; the message says what to do. Ctrl-C saves a checkpoint and raises
            `RunInterrupted`.
    """
    (command,) = (command for command, kind in COMMANDS.items() if type(config) is kind)
    summary: dict[str, Any] = import_module(f"rlhf_ray.stages.{module_of(command)}").run(config, resume=resume)
    return summary
