"""`rlhf-ray quickstart` and `rlhf-ray example`: tasks that come with the package, run from data to evaluation."""

import importlib
from itertools import count
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlhf_ray.cli.paths import local_path
from rlhf_ray.errors import ConfigError

Family = Literal["llama", "qwen2", "gemma2", "mixtral"]
"""Families of the quickstart's new model, as `config.model.Family` has them."""


def quickstart(
    ctx: typer.Context,
    directory: Annotated[Path, typer.Option("--dir", parser=local_path, metavar="PATH",
        help="Output directory.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of data, models and sampling.")] = 0,
    family: Annotated[Family, typer.Option("--family", help="Family of the model that is trained from random "
                                           "weights.")] = "llama",
    fresh: Annotated[
        bool | None,
        typer.Option(
            "--fresh/--resume",
            help="Start over (--dir is renamed), or resume the run in --dir. "
            "By default a finished run starts over and an unfinished one is resumed.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a small model to write positive reviews: data, SFT, reward model, PPO, and a comparison before and after.

    Takes a few minutes on two cores. Change fields of its PPO stage with --section.key=value.
    """
    if ctx.args and not ctx.args[0].startswith("--"):
        raise ConfigError(f"unexpected argument {ctx.args[0]!r}; the quickstart takes only options and overrides")
    from rlhf_ray.observability.run_directory import RunDirectory

    finished = RunDirectory(directory).finished_stage() == "quickstart"  # its PPO stage also writes a summary
    if finished if fresh is None else fresh:
        set_aside(directory)
    importlib.import_module("rlhf_ray.stages.quickstart").run(directory, seed, list(ctx.args), family)


def set_aside(directory: Path) -> Path | None:
    """Rename an existing run directory to the first free `NAME.1`, `NAME.2`, ... and print the new name.

    Raises:
        ConfigError: it is a file, or the working directory or one above it.
    """
    if not directory.exists():
        return None
    whole = directory.resolve()
    if not whole.is_dir() or Path.cwd().resolve().is_relative_to(whole):
        raise ConfigError(f"--dir {directory} is a file or contains the working directory, and cannot be renamed; "
                          "give a separate directory (runs/quickstart)")
    free = next(p for n in count(1) if not (p := whole.with_name(f"{whole.name}.{n}")).exists())
    whole.rename(free)
    typer.echo(f"the run that was in {directory} is now in {free}")
    return free


def example(
    ctx: typer.Context,
    name: Annotated[Literal["arithmetic", "tools", "frozen_lake", "reasoning_gym"],
                    typer.Argument(help="The example.")],
    estimator: Annotated[Literal["grpo", "rloo"], typer.Option("--estimator", help="Advantage estimator.")] = "grpo",
    directory: Annotated[
        Path | None, typer.Option("--dir", parser=local_path, metavar="PATH",
        help="Output directory.", show_default="runs/NAME")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of data, models and sampling.")] = 0,
) -> None:
    """Run an example: arithmetic teaches sums by rewarding correct answers, tools teaches calls of tools over several
    turns, frozen_lake and reasoning_gym teach tasks of gymnasium and reasoning-gym, which have to be installed
    (pip install 'rlhf-ray[gymnasium]', 'rlhf-ray[reasoning-gym]'). Finished stages are not repeated.

    Takes a few minutes on two cores. Change fields of its last stage with --section.key=value.
    """
    if ctx.args and not ctx.args[0].startswith("--"):
        raise ConfigError(f"unexpected argument {ctx.args[0]!r}; an example takes only options and overrides")
    run = importlib.import_module(f"rlhf_ray.stages.{name}_example").run
    run(directory or Path("runs") / name, estimator, seed, list(ctx.args))
