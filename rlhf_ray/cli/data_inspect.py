"""`rlhf-ray data inspect`: shows a data set as training would read it."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rlhf_ray.cli.paths import local_path, path_or_name
from rlhf_ray.errors import DataError

app = typer.Typer(no_args_is_help=True, help="Look at data before training on it.")

Kind = Literal["prompts", "demonstrations", "preferences", "process"]


@app.callback()
def before_command() -> None:
    """Look at data before training on it."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def inspect(
    context: typer.Context,
    path: Annotated[str, typer.Argument(parser=path_or_name, metavar="PATH", help="File, pattern, saved directory or "
                                        "Hub data set.")],
    model: Annotated[str, typer.Option(parser=path_or_name, metavar="TEXT", help="Model or tokenizer: directory or Hub "
                                       "name.")],
    kind: Annotated[Kind | None, typer.Option(help="Kind of the data; detected from its columns if not given.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 3,
    unusable: Annotated[Path | None, typer.Option(
        parser=local_path, metavar="FILE",
        help="Write all malformed rows, and those left out, to this file as JSON lines.")] = None,
) -> None:
    """Show a data set as training would read it: number and length of rows, the template applied, and unusable rows.

    Further options are fields of the data section: --column=question, --max_tokens=256, --limit=1000, --system="...",
    and for judged steps --steps.placeholder and the other fields of `steps`. The form --data.limit=1000 works too.

    The exit code is 1 if rows are malformed, which training would refuse, and 2 if no row can be used.
    """
    from rlhf_ray.cli.data_report import print_inspection
    from rlhf_ray.config.model import ModelConfig
    from rlhf_ray.data.inspection import inspect as look
    from rlhf_ray.data.load_report import left_out_lines
    from rlhf_ray.data.row_readers import check_data_set_on_hub, is_local
    from rlhf_ray.files.writing import write_atomically
    from rlhf_ray.models.loading import load_tokenizer

    given = _given(context.args)
    if not is_local(path):
        check_data_set_on_hub(path, given.get("revision"))
    if kind is None:
        kind = _kind(path, given)
    section, steps = _sections(kind, path, given)
    named = ModelConfig(path=model)
    tokenizer = load_tokenizer(named)
    found = look(section, tokenizer, rows, steps, named)
    if unusable is not None:
        write_atomically(unusable, left_out_lines([*found.row_errors.rows, *found.report.left_out_rows()]).encode())
    print_inspection(found, kind, tokenizer.chat_template is not None, sys.stdout)
    if not found.report.kept:
        raise DataError(f"nothing in {path} can be used as {kind}; the messages above say what is wrong with its rows")
    if found.row_errors.count:
        raise typer.Exit(1)


def _given(arguments: list[str]) -> dict[str, Any]:
    """The fields of the data section and of `steps`, with or without their section's prefix. Fields of `steps` keep the
    prefix in the result, because `steps` is also a data field: {"limit": 9, "steps.good": "+"}."""
    from rlhf_ray.config.config_layers import read_overrides
    from rlhf_ray.config.data import StepsConfig

    written = []
    for argument in arguments:
        name = argument.removeprefix("--data.").removeprefix("--prompts.").removeprefix("--steps.")
        written.append(argument if name == argument else f"--{name}")
    given = read_overrides(written).values
    return {f"steps.{name}" if name in StepsConfig.model_fields else name: value for name, value in given.items()}


def _kind(path: str, given: dict[str, Any]) -> Any:
    """The kind, detected from the columns of the first usable row and the fields that name them."""
    from rlhf_ray.data.inspection import kind_of
    from rlhf_ray.data.load_report import RowErrors
    from rlhf_ray.data.row_readers import Split, stream_rows

    split = Split(given.get("split"), field="--split")
    rows = stream_rows(path, RowErrors(lenient=True), split, None, given.get("subset"), given.get("revision"))
    first = next((block.records[0] for block in rows if len(block)), None)
    if first is None:
        raise DataError(f"{path}: no row can be read; add --kind to see what is wrong with them")
    return kind_of({*first, *(name for name, column in given.items() if isinstance(column, str) and column in first)})


def _sections(kind: str, path: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """The data section and, for process-labelled rows, how steps are written.

    Raises:
        ConfigError: an unknown field, or an invalid value.
    """
    from rlhf_ray.config.data import StepsConfig
    from rlhf_ray.config.section import Section
    from rlhf_ray.data.inspection import KINDS

    class JudgedSteps(Section):
        steps: StepsConfig

    process = kind == "process"
    named = {name: name.removeprefix("steps.") for name in given if process and name.startswith("steps.")}
    written = {field: given[name] for name, field in named.items()}
    section = _built(KINDS[kind], {**{name: value for name, value in given.items() if name not in named}, "path": path})
    return section, _built(JudgedSteps, {"steps": written}).steps if process else None


def _built(cls: Any, values: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from rlhf_ray.config.config_layers import Layer
    from rlhf_ray.config.error_messages import explain
    from rlhf_ray.errors import ConfigError

    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(cls, error, [Layer(values)])) from None
