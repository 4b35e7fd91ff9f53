"""`rlhf-ray check-model`: whether a model works here, as a table or as JSON."""

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from rlhf_ray.cli.paths import path_or_name

if TYPE_CHECKING:
    from rlhf_ray.stages.check_model import CheckReport

T = TypeVar("T")
COLOURS = {"works": "green", "warning": "yellow", "fails": "red", "refused": "red", "not checked": "yellow",
           "does not apply": "dim"}
PartName = StrEnum("PartName", ["tokenizer", "stops", "chat", "turns", "passes", "scalar", "lora", "generation"])
"""Parts of the check, as `stages.check_model.PARTS` has them."""


def check_model(
    model: Annotated[str, typer.Argument(parser=path_or_name, metavar="MODEL",
        help="A model's directory or Hub name, or a run's "
                                         "directory (then its model/).")],
    skip: Annotated[list[PartName] | None, typer.Option("--skip", help="Leave out a part; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=32, help="Tokens of the longest row that is compared; as long "
                                        "as your rows is best.")] = 256,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option(
        "--dtype", help="Precision of the weights; float32 detects smaller errors.",
        show_default="bfloat16 on a GPU, else float32")] = None,
    float32_head: Annotated[bool, typer.Option(
        "--float32-head", help="Compute logits in float32, as with model.float32_head (for bfloat16).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether a model works here, before training it: a table of verdicts, figures, and what to do.

    * *tokenizer*, *stops*, *chat*: texts survive encoding and decoding; which tokens end a response, the end of a
      turn among them; how the chat template begins an answer and takes a system message.
    * *passes*, *scalar*: log-probabilities of the model, and values of a scalar head on it, with gradients, as learners
      compute them, against transformers' own forward pass.
    * *lora*: the same with adapters, and merged weights against adapters.
    * *generation*: what vLLM samples has transformers' log-probabilities, before and after other weights are sent to it
      as PPO does.

    *passes*, *scalar* and *lora* each take the memory of one copy of the weights and of a pass over --tokens tokens
    with gradients; *generation* that of three copies. They run one after the other, in processes of their own.

    Exit code: 0 if everything that was not skipped works; 1 if something fails, is refused for this family, or could
    not be checked; 2 if there is no such model.

    Examples: `rlhf-ray check-model Qwen/Qwen2.5-0.5B-Instruct --tokens 1024`,
    `rlhf-ray check-model runs/quickstart --skip generation --json`
    """
    from rlhf_ray.stages.check_model import CheckOptions, run

    options = CheckOptions(model, tuple(map(str, skip or ())), tokens, dtype, float32_head)
    report = _with_progress(lambda progress: run(options, progress))
    if as_json:
        typer.echo(json.dumps(as_values(report), indent=2, ensure_ascii=False))
    else:
        print_table(report)
    raise typer.Exit(0 if report.works else 1)


def _with_progress(work: Callable[[Callable[[str], None]], T]) -> T:
    """The result of `work`, which is given a function that shows a line of progress on stderr: in place of the last one
    on a terminal, else below it."""
    from rich.console import Console

    from rlhf_ray.observability.progress import is_terminal

    if not is_terminal(sys.stderr):
        return work(lambda text: print(text, file=sys.stderr, flush=True))
    with Console(stderr=True).status("") as status:
        return work(status.update)


def as_values(report: "CheckReport") -> dict[str, Any]:
    """The report for programs."""
    return {
        "model": report.model, "model_type": report.model_type, "dtype": report.dtype, "works": report.works,
        "checks": [{"name": o.name, "verdict": o.verdict, "detail": o.detail, "advice": o.advice, **o.numbers}
                   for o in report.outcomes],
    }


def print_table(report: "CheckReport") -> None:
    """Print a row for each outcome, and whether the model works."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for outcome in report.outcomes:
        table.add_row(outcome.name, Text(outcome.verdict, COLOURS[outcome.verdict]), Text(outcome.detail))
        if outcome.advice:
            table.add_row("", "", Text(outcome.advice, "italic"))
    Console(highlight=False).print(table)
    works = "works here" if report.works else "does not fully work here: see above"
    typer.echo(f"{report.model} ({report.model_type}, {report.dtype}) {works}")
