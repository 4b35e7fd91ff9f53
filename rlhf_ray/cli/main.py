"""The `rlhf-ray` command line: its commands, and how errors end it.

Heavy imports happen inside commands, so that `--help` is fast.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:  # `python -m` would search the working directory first
    del sys.path[0]

import errno
import os
from typing import Annotated

import typer

from rlhf_ray.cli.check_model import check_model
from rlhf_ray.cli.data_inspect import app as data
from rlhf_ray.cli.doctor import doctor
from rlhf_ray.cli.examples import example, quickstart
from rlhf_ray.cli.generate_commands import compare, generate
from rlhf_ray.cli.jobs import jobs, logs, stop
from rlhf_ray.cli.ledger import ledger
from rlhf_ray.cli.library_logging import quiet_libraries
from rlhf_ray.cli.plan import plan
from rlhf_ray.cli.run_commands import profile, report, scale, status
from rlhf_ray.cli.samples import samples
from rlhf_ray.cli.serve_reward import serve_reward
from rlhf_ray.cli.stage import StageCommand, ppo, preferences, process_reward, reward_model, sft
from rlhf_ray.cli.submit import submit
from rlhf_ray.errors import RLHFError, RunInterrupted, StoppedEarly

TRAINING, CLUSTER, MODELS, AROUND = "Stages", "On a cluster", "With a model", "Around a run"
RUNS = ("quickstart", "sft", "reward-model", "process-reward", "preferences", "ppo", "serve-reward")
"""Commands that continue if their output cannot be written. A closed pipe ends the others."""
TEXTS = ("generate", "compare")
"""Commands whose output vLLM's warnings would interrupt."""
STAGE_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}

HELP = "PPO from human feedback on Ray: vLLM rollouts, DeepSpeed learners, verified weights, resumable runs."

app = typer.Typer(
    name="rlhf-ray",
    epilog="Start with: rlhf-ray quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # it rewraps docstrings
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"rlhf-ray {version('rlhf-ray')}")
        raise typer.Exit


@app.callback(help=HELP)
def before_command(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command, and log levels of other libraries."""
    if context.invoked_subcommand in TEXTS:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    quiet_libraries()


for first_command in (quickstart, example):
    app.command(rich_help_panel="Start here", context_settings=STAGE_ARGUMENTS)(first_command)
for stage in (sft, reward_model, process_reward, preferences, ppo):
    app.command(cls=StageCommand, rich_help_panel=TRAINING, context_settings=STAGE_ARGUMENTS)(stage)
app.command(rich_help_panel=CLUSTER, context_settings=STAGE_ARGUMENTS)(submit)
for about_jobs in (jobs, logs, stop):
    app.command(rich_help_panel=CLUSTER)(about_jobs)
app.command(rich_help_panel=MODELS)(check_model)
app.command(rich_help_panel=MODELS)(generate)
app.command(rich_help_panel=MODELS)(compare)
app.command(rich_help_panel=MODELS)(serve_reward)
app.add_typer(data, name="data", rich_help_panel=AROUND)
app.command(rich_help_panel=AROUND, context_settings=STAGE_ARGUMENTS)(plan)
for command in (status, samples, scale, profile, ledger, report, doctor):
    app.command(rich_help_panel=AROUND)(command)


def main() -> None:
    """Run the command line; an `RLHFError` is one message and an exit code, without a traceback."""
    if any(argument in RUNS for argument in sys.argv[1:2]):
        from rlhf_ray.coordinator.stop import OF_COMMAND, StoppedAtOnce
        from rlhf_ray.observability.non_blocking_output import use_non_blocking_output

        use_non_blocking_output()
        if sys.argv[1] != "serve-reward":  # which has nothing to save, and another exit code
            OF_COMMAND.handle()
        try:
            _run()
        except StoppedAtOnce as stopped:
            _say("", stopped.message)
            raise
        finally:
            OF_COMMAND.process_ends()
        return
    try:
        _run()
        sys.stdout.flush()
    except BrokenPipeError:  # `rlhf-ray status RUN | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes it once more when it ends
        sys.exit(1)


def _run() -> None:
    try:
        app()
    except RLHFError as error:
        ended = isinstance(error, RunInterrupted | StoppedEarly)  # not an error; the message explains it
        _say("" if ended else "error: ", str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" of {error.filename}" if error.filename else ""
        _say("error: ", f"the disk{where} is full ({error.strerror}). Free some space, then resume with --resume")
        sys.exit(1)


def _say(outcome: str, message: str) -> None:
    """'error: message' on stderr, coloured on a terminal."""
    if not sys.stderr.isatty():
        print(f"{outcome}{message}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble((outcome, "bold red"), message), soft_wrap=True)


if __name__ == "__main__":
    main()
