"""`rlhf-ray export`: a model in Hugging Face format from a checkpoint of a run."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

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
) -> None:
    """Write a Hugging Face model from a checkpoint of a run, finished or not, with adapters merged in.

    Needs neither Ray nor a GPU, and only reads the run's files. Beside the model are adapter/, model_ema/ and
    value_head/ where the run trains them.
    """
    from transformers.utils.logging import disable_progress_bar

    from rlhf_ray.stages.export_checkpoint import export_checkpoint

    disable_progress_bar()
    exported = export_checkpoint(run, step, output, typer.echo)
    for name, path in exported.files.items():
        typer.echo(f"{name}: {path}")
