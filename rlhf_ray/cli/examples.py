"""`rlhf-ray quickstart` and `rlhf-ray example`: tasks that come with the package, run from data to evaluation."""

import importlib
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from rlhf_ray.errors import ConfigError


def quickstart(
    ctx: typer.Context,
    directory: Annotated[Path, typer.Option("--dir", help="Where the run is written.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of data, models and sampling.")] = 0,
    fresh: Annotated[
        bool | None,
        typer.Option(
            "--fresh/--resume",
            help="Begin anew (what is in --dir is moved aside), or go on with it. "
            "By default a finished run is begun anew and an unfinished one goes on.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Teach a small model to write positive reviews: data, SFT, reward model, PPO, and a before/after verdict.

    Takes some minutes on two cores. Fields of its PPO stage may be changed with --section.key=value.
    """
    if ctx.args and not ctx.args[0].startswith("--"):
        raise ConfigError(f"unexpected argument {ctx.args[0]!r}; the quickstart takes options and overrides only")
    from rlhf_ray.observability.run_directory import RunDirectory

    finished = RunDirectory(directory).finished_stage() == "quickstart"  # its PPO stage alone writes a summary too
    if finished if fresh is None else fresh:
        set_aside(directory)
    from rlhf_ray.cli.library_logging import quiet_libraries

    quiet_libraries()
    importlib.import_module("rlhf_ray.stages.quickstart").run(directory, seed, list(ctx.args))


def set_aside(directory: Path) -> Path | None:
    """Rename an existing run directory to the first free `NAME.1`, `NAME.2`, ... and say so.

    Raises:
        ConfigError: it is not a directory of its own (a file, or the working directory or one above it).
    """
    if not directory.exists():
        return None
    whole = directory.resolve()
    if not whole.is_dir() or Path.cwd().resolve().is_relative_to(whole):
        raise ConfigError(f"--dir {directory} cannot be begun anew; name a directory of its own (runs/quickstart)")
    free = next(p for n in count(1) if not (p := whole.with_name(f"{whole.name}.{n}")).exists())
    whole.rename(free)
    typer.echo(f"the run that was in {directory} is now in {free}")
    return free


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
    from rlhf_ray.cli.library_logging import quiet_libraries

    quiet_libraries()
    run = importlib.import_module(f"rlhf_ray.stages.{name}").run
    run(directory or Path("runs") / name, str(estimator), seed, list(ctx.args))
