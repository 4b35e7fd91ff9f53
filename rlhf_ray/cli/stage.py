"""The commands that run one stage each: `sft`, `reward-model`, `process-reward`, `preferences`, `evaluate`, and `ppo`,
which is also called `grpo`, `rloo` and `reinforce` with the defaults of these."""

from __future__ import annotations

from itertools import chain, count, islice
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import CompletionItem, TyperCommand

from rlhf_ray.cli.paths import local_path
from rlhf_ray.errors import ConfigError, RLHFError

if TYPE_CHECKING:
    from rlhf_ray.observability.run_directory import RunDirectory

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [--section.key=value ...]", help="A YAML file, and fields to change.", show_default=False
    ),
]
ModelAndFile = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] FILE [--section.key=value ...]", show_default=False,
        help="A model's directory or Hub name, or a run's directory; a YAML file of ppo or grpo, and fields to change."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in run.dir.")]
KeepFinished = Annotated[bool, typer.Option(
    "--resume", help="Keep what a finished run left in run.dir; an unfinished one, which has no checkpoints, begins "
    "anew.")]
Stage = Annotated[str | None, typer.Option(
    "--stage", help="Whose configuration it is, where its sections do not tell: ppo, grpo, sft, reward-model, ...")]
HelpAll = Annotated[bool, typer.Option("--help-all", help="List every field, then stop.", is_eager=True)]


class StageCommand(TyperCommand):
    """A command whose help teaches its configuration as well as its options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The usual help, then the sections, the most used fields and an example."""
        super().format_help(ctx, formatter)
        from rlhf_ray.cli.config_help import print_common_fields

        print_common_fields(str(self.name))

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        """The command's options, and those fields of its configuration that begin with what is typed: at least a
        letter, since there are hundreds."""
        options = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("--") or incomplete == "--":
            return options
        from rlhf_ray.cli.config_help import fields_that_begin

        found = fields_that_begin(str(self.name), incomplete.removeprefix("--"))
        # Shorter than a line of a terminal: fish would take a wrapped line for another completion.
        return options + [CompletionItem(f"--{f.path}", help=shorten(f.sentence, 70, placeholder="...")) for f in found]


def sft(arguments: Arguments = None, resume: Resume = False, help_all: HelpAll = False) -> None:
    """Fine-tune a language model on demonstrations."""
    _run("sft", arguments, resume, help_all)


def reward_model(arguments: Arguments = None, resume: Resume = False, help_all: HelpAll = False) -> None:
    """Train a scalar reward model on preference pairs."""
    _run("reward-model", arguments, resume, help_all)


def process_reward(arguments: Arguments = None, resume: Resume = False, help_all: HelpAll = False) -> None:
    """Train a process reward model, which judges each step of a solution."""
    _run("process-reward", arguments, resume, help_all)


def preferences(arguments: Arguments = None, resume: KeepFinished = False, help_all: HelpAll = False) -> None:
    """Sample pairs of responses from a model and rank each pair by a judge."""
    _run("preferences", arguments, resume, help_all)


def ppo(arguments: Arguments = None, resume: Resume = False, help_all: HelpAll = False) -> None:
    """Train a policy by its rewards, with a critic, held near its reference by a KL penalty."""
    _run("ppo", arguments, resume, help_all)


def grpo(arguments: Arguments = None, resume: Resume = False, help_all: HelpAll = False) -> None:
    """Train a policy by its rewards: compare 8 samples of each prompt. No critic, and no reference by default."""
    _run("grpo", arguments, resume, help_all)


def rloo(arguments: Arguments = None, resume: Resume = False, help_all: HelpAll = False) -> None:
    """Train a policy by its rewards: compare each of 4 samples of a prompt with the others. No critic."""
    _run("rloo", arguments, resume, help_all)


def reinforce(arguments: Arguments = None, resume: Resume = False, help_all: HelpAll = False) -> None:
    """Train a policy by its rewards, one sample of each prompt. No critic."""
    _run("reinforce", arguments, resume, help_all)


def evaluate(
    arguments: ModelAndFile = None,
    directory: Annotated[Path | None, typer.Option("--dir", parser=local_path, metavar="PATH", show_default=False,
        help="Directory to write; the first free one of runs/evaluate, runs/evaluate-2, ... if not given.")] = None,
    help_all: HelpAll = False,
) -> None:
    """Measure a model on held-out prompts, in environments or by rewards alone, without training.

    FILE is a configuration of ppo or grpo, such as the one that trained the model: its `prompts`, `environments`,
    `rewards` and `evaluation` are used, what concerns training is left out. MODEL takes the place of its model.path;
    leave it out to measure that one. The held-out prompts are those of the training: `evaluation.prompts`, or the rows
    of `prompts.held_out`; with neither, all prompts, at most `evaluation.limit`. A reference, from which KL and
    perplexity are measured, is started only if `reference.path` names one.
    """
    if help_all:
        from rlhf_ray.cli.config_help import print_all_fields

        print_all_fields("evaluate")
        return
    files, overrides = _files_and_overrides(arguments or [])
    if not 1 <= len(files) <= 2:
        raise ConfigError(f"evaluate takes a model and a configuration file, and got {' '.join(files) or 'neither'}: "
                          "rlhf-ray evaluate MODEL FILE [--section.key=value ...] (what it may hold: --help)")
    named = [key.partition("=")[0] for key in overrides]
    if directory is not None and "--run.dir" in named:
        raise ConfigError(f"--dir {directory} and --run.dir both name the directory; leave one of them out")
    from rlhf_ray.config.load import COMMANDS, load
    from rlhf_ray.observability.progress import FINISHED
    from rlhf_ray.observability.run_directory import RunDirectory
    from rlhf_ray.stages.run_stage import run_loaded

    place = [f"--run.dir={directory or free_directory(Path('runs/evaluate'))}"]
    config = load(COMMANDS["evaluate"], local_path(files[-1]), [*place, *_model_named(files[:-1]), *overrides],
                  has_gpus=may_have_gpus)
    run_loaded("evaluate", config, resume=False)
    from rlhf_ray.stages.evaluate import print_evaluation

    print_evaluation(RunDirectory(config.run.dir), typer.echo)
    typer.echo(f"{FINISHED}{config.run.dir}")


def free_directory(first: Path) -> Path:
    """`first`, or with a number behind its name, the first of these that is not there."""
    numbered = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return next(path for path in chain([first], numbered) if not path.exists())


def _model_named(named: list[str]) -> list[str]:
    """Overrides for the model on the command line, if there is one; the revision in the file is of another model."""
    if not named:
        return []
    from rlhf_ray.cli.paths import path_or_name
    from rlhf_ray.stages.resolve_model import model_at

    model, notice = model_at(path_or_name(named[0]), "MODEL", dtype="float32")
    if notice:
        typer.echo(notice, err=True)
    return [f"--model.path={model.path}", "--model.revision=null"]


def split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The CONFIG among `arguments`, wherever it stands, and the overrides (`--a.b=c`, or `--a.b` and `c`).

    Raises:
        ConfigError: more than one configuration file.
    """
    files, overrides = _files_and_overrides(arguments)
    if len(files) > 1:
        if fields := [file for file in files if "=" in file]:
            raise ConfigError(f"unexpected argument {fields[0]!r}; a field is changed by --{fields[0].lstrip('-')}")
        raise ConfigError(f"one configuration file at a time; got {' and '.join(files)}")
    return (local_path(files[0]) if files else None), overrides


def _files_and_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    files: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            files.append(argument)
            continue
        overrides.append(argument)
        if "=" not in argument and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return files, overrides


def _run(command: str, arguments: list[str] | None, resume: bool, help_all: bool) -> None:
    """Load the stage's configuration and hand over to `rlhf_ray.stages`."""
    if help_all:
        from rlhf_ray.cli.config_help import print_all_fields

        print_all_fields(command)
        return
    if not arguments:
        raise ConfigError(f"give a configuration file: rlhf-ray {command} CONFIG (what it may hold: --help)")
    path, overrides = split_arguments(arguments)
    from rlhf_ray.checkpoint.store import CheckpointStore
    from rlhf_ray.cli.auto_resume import Outage, is_child, run_and_resume
    from rlhf_ray.config.load import COMMANDS, load
    from rlhf_ray.observability.progress import FINISHED
    from rlhf_ray.observability.run_directory import RunDirectory
    from rlhf_ray.stages.run_stage import run_loaded

    config = load(COMMANDS[command], path, overrides, resume, may_have_gpus)
    if config.run.auto_resume and not is_child():
        store = CheckpointStore(RunDirectory(config.run.dir).checkpoints, keep=1)
        from rlhf_ray.cluster.head_node import is_listening

        raise typer.Exit(run_and_resume([command, *arguments], store, resume, Outage(config.cluster, is_listening)))
    run_loaded(command, config, resume)
    print_results(RunDirectory(config.run.dir))
    typer.echo(f"{FINISHED}{config.run.dir}")


def may_have_gpus(address: str | None) -> bool:
    """Whether this machine has GPUs; a cluster that is joined later may have some."""
    from rlhf_ray.planning.local_machine import gpus_here, visible_gpus

    return address is not None or bool(gpus_here()[:visible_gpus()])


def print_results(run: RunDirectory) -> None:
    """Print the held-out metrics before and after a run, whether its policy has hardly moved, and its files."""
    try:
        _print_metrics(run)
    except (RLHFError, ValueError, OSError) as error:  # damaged files; the run has succeeded nevertheless
        typer.echo(f"its metrics cannot be shown: {error}", err=True)
    for name, path in (("model", run.model), ("best", run.best), ("report", run.report)):
        if path.exists():
            typer.echo(f"{name}: {path}")


def _print_metrics(run: RunDirectory) -> None:
    from rlhf_ray.observability.metrics import metric_rows_from_end
    from rlhf_ray.observability.run_directory import read_json
    from rlhf_ray.observability.still_policy import LAST_ROWS, still_policy
    from rlhf_ray.observability.tables import changes, print_before_after

    evaluation = read_json(run.evaluation)
    if "before" in evaluation and "after" in evaluation:
        print_before_after(changes(evaluation["before"], evaluation["after"]))
    if still := still_policy(list(islice(metric_rows_from_end(run.path), 10 * LAST_ROWS))[::-1]):
        typer.echo(still)
