"""`rlhf-ray samples`: what the policy wrote in a step, in the terminal and as a page."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_ray.cli.paths import local_path
from rlhf_ray.cli.run_commands import require_run
from rlhf_ray.errors import DataError

EXTREMES = 3
"""Best and worst samples that are shown if nothing else is asked for."""


def samples(
    run: Annotated[Path, typer.Argument(parser=local_path, metavar="RUN", help="A run's directory.")],
    step: Annotated[int | None, typer.Option(min=1, help="The step; by default the newest.")] = None,
    worst: Annotated[int | None, typer.Option(min=0, help="Show so many samples with the lowest rewards.")] = None,
    best: Annotated[int | None, typer.Option(min=0, help="Show so many samples with the highest rewards.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Only samples of prompts that contain TEXT, from "
                                               "the newest steps with such prompts unless --step is given.")] = None,
    page: Annotated[Path | None, typer.Option(parser=local_path, metavar="FILE",
                                              help="Where to write the page; by default RUN/samples.html.")] = None,
) -> None:
    """Show samples of a run: prompt, response, reward and its parts, advantage, finish reason.

    Also writes a page with the samples of each prompt side by side, to search, filter and sort, and with every token's
    log-probability gap, advantage and version. The command reads only the run's directory, during the run and
    afterwards; `logging.samples` is what a run saves.
    """
    require_run(run)
    from rich.console import Console

    from rlhf_ray.files.writing import write_atomically
    from rlhf_ray.observability.sample_view import extremes, print_samples, sample_page, samples_of

    found = samples_of(run, step, prompt)
    if worst is None and best is None and prompt is not None:
        shown = [(f"sample {i} of {len(found)}", sample) for i, sample in enumerate(found, 1)]
    elif worst is None and best is None:
        shown = extremes(found, EXTREMES, EXTREMES)
    else:
        shown = extremes(found, worst or 0, best or 0)
    print_samples(Console(highlight=False, soft_wrap=True), found, shown)
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
