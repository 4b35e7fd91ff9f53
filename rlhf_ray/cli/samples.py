"""`rlhf-ray samples`: what the policy wrote in a step, in the terminal, as a page, and as JSON lines."""

import sys
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_ray.cli.paths import local_path
from rlhf_ray.cli.run_commands import require_run
from rlhf_ray.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rlhf_ray.observability.sample_choice import NumberRange

EXTREMES = 3
"""Best and worst samples that are shown if nothing else is asked for."""
SHOWN_SAMPLES = 20
"""Samples that are shown, unless a number of them or all of them are asked for."""


def number_range(text: str) -> "NumberRange":
    """A range among the arguments; errors as `NumberRange.parse`."""
    from rlhf_ray.observability.sample_choice import NumberRange

    return NumberRange.parse(text)


def samples(
    run: Annotated[Path, typer.Argument(parser=local_path, metavar="RUN", help="A run's directory.")],
    step: Annotated[Any, typer.Option(parser=number_range, metavar="RANGE", help="The step, or a range of steps: "
                                      "10..20, or .. for all; by default the newest.")] = None,
    worst: Annotated[int | None, typer.Option(min=0, help="Show so many samples with the lowest rewards.")] = None,
    best: Annotated[int | None, typer.Option(min=0, help="Show so many samples with the highest rewards.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Only samples of prompts that contain TEXT."
                                               )] = None,
    cause: Annotated[list[str] | None, typer.Option(metavar="CAUSE", help="Only episodes that ended so, for example "
                                                    "error_timeout; may be given several times.")] = None,
    reward: Annotated[Any, typer.Option(parser=number_range, metavar="RANGE", help="Only samples with such a reward: "
                                        "..0.5, 0.5.., 0..1 or 1.")] = None,
    length: Annotated[Any, typer.Option(parser=number_range, metavar="RANGE", help="Only samples of which the policy "
                                        "sampled so many tokens: 200.. or ..20.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Show long texts whole, and all samples that were "
                                       "found.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each token: sampled by the policy or observed, its "
                                         "log-probability, advantage and version.")] = False,
    page: Annotated[Path | None, typer.Option(parser=local_path, metavar="FILE",
                                              help="Where to write the page; by default RUN/samples.html.")] = None,
    jsonl: Annotated[Path | None, typer.Option(parser=local_path, metavar="FILE", help="Write the samples to FILE as "
                                               "JSON, one a line, instead of showing them; - for the output.")] = None,
) -> None:
    """Show samples of a run: prompt, response, reward and its parts, advantage, finish reason; of episodes each turn.

    With --prompt, --cause, --reward or --length, samples are taken from the newest five steps that have such ones,
    unless --step is given.

    Also writes a page with the samples of each prompt side by side, to search, filter and sort, and with every token's
    log-probability gap, advantage and version. The command reads only the run's directory, during the run and
    afterwards; `logging.samples` is what a run saves.
    """
    require_run(run)
    from rich.console import Console

    from rlhf_ray.observability.sample_choice import Choice, rows_of
    from rlhf_ray.observability.sample_view import extremes, print_samples, samples_of

    choice = Choice(step, prompt, _known_causes(cause or ()), reward, length)
    if jsonl is not None:
        rows: Iterable[Mapping[str, Any]] = rows_of(run, choice)
        if worst is not None or best is not None:
            chosen = extremes(list(rows), worst or 0, best or 0, lambda row: row["score"])
            rows = [row for _, row in chosen]
        _export(jsonl, rows)
        return
    found = samples_of(run, choice)
    left_out = 0
    if worst is not None or best is not None:
        shown = extremes(found, worst or 0, best or 0)
    elif choice.is_open:
        shown = extremes(found, EXTREMES, EXTREMES)
    else:
        shown = [(f"sample {i} of {len(found)}", sample) for i, sample in enumerate(found, 1)]
        left_out = 0 if full else max(0, len(shown) - SHOWN_SAMPLES)
        shown = shown[:len(shown) - left_out]
    print_samples(Console(highlight=False, soft_wrap=True), found, shown, full, tokens)
    if left_out:
        typer.echo(f"\n{left_out} samples more: --full shows all, --jsonl FILE writes them")
    _write_page(run, found, page)


def _known_causes(causes: Iterable[str]) -> tuple[str, ...]:
    """Raises ConfigError for a cause that no episode can have."""
    from rlhf_ray.config.environments import CAUSES

    for cause in causes:
        if cause not in CAUSES:
            raise ConfigError(f"--cause={cause}: there is no such cause; there are {', '.join(CAUSES)}")
    return tuple(causes)


def _export(target: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    from rlhf_ray.observability.sample_export import write_json_lines
    from rlhf_ray.observability.tables import counted

    rows = iter(rows)
    rows = chain(list(islice(rows, 1)), rows)  # an error comes before the file
    if str(target) == "-":
        write_json_lines(rows, sys.stdout)
        return
    try:
        with target.open("w", encoding="utf-8") as file:
            count = write_json_lines(rows, file)
    except OSError as error:
        raise DataError(f"--jsonl={target} cannot be written: {error.strerror or error}; name another file") from error
    typer.echo(f"{counted(count, 'sample')}: {target}")


def _write_page(run: Path, found: Any, page: Path | None) -> None:
    from rlhf_ray.files.writing import write_atomically
    from rlhf_ray.observability.sample_view import sample_page

    target = page or run / "samples.html"
    try:
        write_atomically(target, sample_page(run, found).encode())
    except OSError as error:
        if page is not None:
            raise DataError(f"--page={page} cannot be written: {error.strerror or error}; name another file") from error
        typer.echo(f"no page: {target} cannot be written ({error.strerror or error}); --page names another file",
                   err=True)
    else:
        typer.echo(f"\npage: {target}")
