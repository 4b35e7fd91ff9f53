"""`rlhf-ray profile`: what a run that is going on computes in its next step."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_ray.cli.arguments import require_run

SHOWN = 5
"""Operators of each worker that the terminal shows."""


def profile(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a PPO run that is going on.")],
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest wait for the step to begin and "
                                           "end.")] = 3600.0,
) -> None:
    """Profile the next step of a run: torch's profiler in learners, reference and generators, and who worked when.

    Traces, for ui.perfetto.dev, and a summary lie in RUN/profile/step_N; the report is made anew and shows them.
    """
    require_run(run)
    from rlhf_ray.observability.control import ask
    from rlhf_ray.observability.report import write_report

    made = ask(run, "profile", timeout_s=timeout)
    directory = run / "profile" / f"step_{made['step']}"
    report = write_report(run)
    _show(json.loads((directory / "profile.json").read_text()))
    typer.echo(f"traces: {directory}\nreport: {report}")


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left",
                  title=f"step {found['step']}, {found['seconds']:.3g} s")
    table.add_column("worker")
    table.add_column("operator")
    table.add_column("calls", justify="right")
    table.add_column("own ms", justify="right")
    for worker, its in sorted(found["workers"].items()):
        for i, operator in enumerate(its["operators"][:SHOWN]):
            table.add_row("" if i else worker, operator["name"], f"{operator['calls']:,}", f"{operator['own_ms']:,.1f}")
    Console(highlight=False, soft_wrap=True).print(table)
