"""`rlhf-ray export`: a model in Hugging Face format from a checkpoint of a run."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rlhf_ray.checkpoint.hub import OPTION, check_push, push
from rlhf_ray.cli.paths import local_path
from rlhf_ray.errors import ConfigError


def _step(text: str) -> int | Literal["best"]:
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise ConfigError(f"--step={text}: give the number of a step, or best")
    return int(text)


def export(
    run: Annotated[Path, typer.Argument(parser=local_path, metavar="RUN",
        help="A run's directory, or one of its checkpoints.")],
    step: Annotated[Any, typer.Option(
        "--step", parser=_step, metavar="N|best", help="Step of the checkpoint, or the best one by "
        "checkpoint.best_metric; the newest by default.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(
        "--output", parser=local_path, metavar="DIR", help="A new directory for the model; RUN/export/step_N by "
        "default.", show_default=False)] = None,
    push_to_hub: Annotated[str | None, typer.Option(
        OPTION, metavar="OWNER/NAME", help="Upload the model to this repository of the Hugging Face Hub, which is made "
        "if it is not there. Needs `hf auth login` or HF_TOKEN.", show_default=False)] = None,
    private: Annotated[bool, typer.Option("--private", help="Make that repository a private one.")] = False,
) -> None:
    """Write a Hugging Face model from a checkpoint of a run, finished or not, with adapters merged in.

    Needs neither Ray nor a GPU, and only reads the run's files. Beside the model are adapter/, model_ema/ and
    value_head/ where the run trains them.
    """
    if private and push_to_hub is None:
        raise ConfigError(f"--private is about the repository of {OPTION}; add {OPTION} OWNER/NAME, or leave it out")
    if push_to_hub is not None:
        push_to_hub = check_push(push_to_hub, private)
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    from rlhf_ray.stages.export_checkpoint import export_checkpoint

    disable_progress_bar()
    exported = export_checkpoint(run, step, output, typer.echo, repository=push_to_hub)
    for name, path in exported.files.items():
        typer.echo(f"{name}: {path}")
    if push_to_hub is not None:
        if sys.stderr.isatty():
            enable_progress_bar()  # of huggingface_hub too
        message = f"rlhf-ray export, step {exported.step} of {exported.steps}"
        typer.echo(f"on the Hub: {push(exported.files['model'], push_to_hub, private, message, typer.echo)}")
