"""The `rlhf-ray` command line: its commands, and how errors end it.

Heavy imports happen inside commands, so that `--help` is fast.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:  # `python -m` would search the working directory first
    del sys.path[0]

import errno
import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rlhf_ray.cli.check_model import check_model
from rlhf_ray.cli.data_inspect import app as data
from rlhf_ray.cli.doctor import doctor
from rlhf_ray.cli.examples import example, quickstart
from rlhf_ray.cli.export import export
from rlhf_ray.cli.generate_commands import compare, generate
from rlhf_ray.cli.jobs import jobs, logs, stop
from rlhf_ray.cli.ledger import ledger
from rlhf_ray.cli.library_logging import quiet_libraries
from rlhf_ray.cli.plan import plan
from rlhf_ray.cli.presets import presets
from rlhf_ray.cli.run_commands import profile, report, scale, status
from rlhf_ray.cli.samples import samples
from rlhf_ray.cli.serve_reward import serve_reward
from rlhf_ray.cli.stage import (
    StageCommand,
    evaluate,
    grpo,
    ppo,
    preferences,
    process_reward,
    reinforce,
    reward_model,
    rloo,
    sft,
)
from rlhf_ray.cli.submit import submit
from rlhf_ray.errors import ConfigError, RLHFError, RunInterrupted, StoppedEarly

TRAINING, CLUSTER, MODELS, AROUND = "Stages", "On a cluster", "With a model", "Around a run"
RUNS = ("quickstart", "sft", "reward-model", "process-reward", "preferences", "ppo", "grpo", "rloo", "reinforce",
        "evaluate", "serve-reward")
"""Commands that continue if their output cannot be written. A closed pipe ends the others."""
MODEL_HERE = ("check-model", "generate", "compare", "serve-reward")
"""Commands that load a model in their own process."""
TEXTS = ("generate", "compare")
"""Commands whose output vLLM's warnings would interrupt."""
STAGE_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}

HELP = "GRPO and PPO on Ray: vLLM rollouts, DeepSpeed learners, verified weights, resumable runs."
STAGES_HERE = "sft, reward-model, process-reward, preferences, grpo, ppo, rloo, reinforce"
NOT_HERE = {
    "train": f"each stage has its own command: {STAGES_HERE}. Reinforcement learning on rewards is grpo or ppo",
    "eval": "`rlhf-ray evaluate MODEL FILE` measures a model on the held-out prompts of a configuration; "
            "`rlhf-ray compare` compares two models, and `rlhf-ray generate` writes responses",
    "dpo": "DPO is not among the stages. From preference pairs, train a reward model with `rlhf-ray reward-model`, and "
           "the policy on it with `rlhf-ray ppo` or `rlhf-ray grpo`",
    "dapo": "use `rlhf-ray ppo --algorithm.preset=dapo`; `rlhf-ray presets dapo` prints its values",
    "gspo": "use `rlhf-ray ppo --algorithm.preset=gspo`; `rlhf-ray presets gspo` prints its values",
    "cispo": "use `rlhf-ray ppo --algorithm.preset=cispo`; `rlhf-ray presets cispo` prints its values",
    "dr-grpo": "use `rlhf-ray ppo --algorithm.preset=dr_grpo`; `rlhf-ray presets dr_grpo` prints its values",
    "reinforce-pp": "use `rlhf-ray ppo --algorithm.preset=reinforce_pp`; `rlhf-ray presets reinforce_pp` prints its "
                    "values",
    "rm": "use `rlhf-ray reward-model`",
    "prm": "use `rlhf-ray process-reward`",
    "resume": "repeat the run's command with --resume",
    "merge": "use `rlhf-ray export RUN`, which merges adapters into the model",
    "serve": "use `rlhf-ray serve-reward` for a reward model; a trained one is a Hugging Face model, which vLLM serves",
}
"""What people look for by a name that other systems have, and what to use here."""
SAME = {"evaluation": "eval", "kto": "dpo", "orpo": "dpo", "simpo": "dpo", "ipo": "dpo", "reward": "rm",
        "reinforce++": "reinforce-pp", "drgrpo": "dr-grpo", "rlhf": "train", "fit": "train", "finetune": "train"}
"""Other words for the keys of `NOT_HERE`."""

class Commands(TyperGroup):
    """The commands; the names of other systems' commands get an answer that says what to use."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer's, whose suggestion of a similar name would mislead for the names in `NOT_HERE`."""
        name = args[0].lower().replace("_", "-") if args else ""
        answer = NOT_HERE.get(SAME.get(name, name))
        if answer and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"There is no command '{args[0]}': {answer}.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="rlhf-ray",
    cls=Commands,
    epilog="Start with: rlhf-ray quickstart",
    no_args_is_help=True,
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
    if context.invoked_subcommand in MODEL_HERE and sys.flags.optimize > 1:
        raise ConfigError(f"PYTHONOPTIMIZE={sys.flags.optimize} removes the docstrings from which transformers builds "
                          f"its models, and `{context.invoked_subcommand}` loads one in this process; unset it")
    if context.invoked_subcommand in TEXTS:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    quiet_libraries()


for first_command in (quickstart, example):
    app.command(rich_help_panel="Start here", context_settings=STAGE_ARGUMENTS)(first_command)
for stage in (sft, reward_model, process_reward, preferences, grpo, ppo, rloo, reinforce, evaluate):
    app.command(cls=StageCommand, rich_help_panel=TRAINING, context_settings=STAGE_ARGUMENTS)(stage)
app.command(rich_help_panel=CLUSTER, context_settings=STAGE_ARGUMENTS)(submit)
for about_jobs in (jobs, logs, stop):
    app.command(rich_help_panel=CLUSTER)(about_jobs)
app.command(rich_help_panel=MODELS)(check_model)
app.command(rich_help_panel=MODELS)(export)
app.command(rich_help_panel=MODELS)(generate)
app.command(rich_help_panel=MODELS)(compare)
app.command(rich_help_panel=MODELS)(serve_reward)
app.add_typer(data, name="data", rich_help_panel=AROUND)
app.command(rich_help_panel=AROUND, context_settings=STAGE_ARGUMENTS)(plan)
app.command(rich_help_panel=TRAINING)(presets)
for command in (status, samples, scale, profile, ledger, report, doctor):
    app.command(rich_help_panel=AROUND)(command)


def main() -> None:
    """Run the command line; an `RLHFError` is one message and an exit code, without a traceback."""
    if any(argument in RUNS for argument in sys.argv[1:2]):
        from rlhf_ray.coordinator.stop import OF_COMMAND, StoppedAtOnce
        from rlhf_ray.observability.non_blocking_output import drain_output, use_non_blocking_output

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
            drain_output()
        return
    try:
        _run()
        sys.stdout.flush()
    except BrokenPipeError:  # `rlhf-ray status RUN | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes it once more when it ends
        sys.exit(1)


def _run() -> None:
    try:
        app(prog_name="rlhf-ray")  # also with `python -m`; the name of the completion's variable follows from it
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
