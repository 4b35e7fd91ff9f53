"""`rlhf-ray example`: tasks that come with the package, run from data to verdict."""

import importlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlhf_ray.errors import ConfigError


class Example(StrEnum):
    """Examples by name; each is the stage module of that name and a folder of configs/examples."""

    arithmetic = "arithmetic"


class Estimator(StrEnum):
    """Files of an example's folder, by what makes the advantages."""

    grpo = "grpo"
    rloo = "rloo"


def example(
    ctx: typer.Context,
    name: Annotated[Example, typer.Argument(help="Which one.")],
    estimator: Annotated[Estimator, typer.Option("--estimator", help="How advantages are made.")] = Estimator.grpo,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where everything is written.", show_default="runs/NAME")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of data, models and sampling.")] = 0,
) -> None:
    """Run an example: arithmetic teaches sums by rewarding right answers. What is finished is not run again.

    Takes some minutes on two cores. Fields of its last stage may be changed with --section.key=value.
    """
    if ctx.args and not ctx.args[0].startswith("--"):
        raise ConfigError(f"unexpected argument {ctx.args[0]!r}; an example takes options and overrides only")
    from rlhf_ray.cli.quiet import quiet_libraries

    quiet_libraries()
    run = importlib.import_module(f"rlhf_ray.stages.{name}").run
    run(directory or Path("runs") / name, str(estimator), seed, list(ctx.args))
