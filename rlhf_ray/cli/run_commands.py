"""Commands that read or steer one run's directory: `rlhf-ray status`, `scale`, `profile`, `report`."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_ray.errors import DataError

SHOWN_OPERATORS = 5
"""Operators of each worker that `rlhf-ray profile` shows."""


def require_run(run: Path) -> None:
    """Refuse a RUN that is no directory.

    Raises:
        DataError: naming it.
    """
    if not run.is_dir():
        raise DataError(f"there is no run directory {run}; name the one that a stage wrote (its run.dir)")


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory; or a job's id, with --address.")],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it anew every two seconds; Ctrl-C ends.")] = False,
    address: Annotated[str | None, typer.Option(
        envvar="RAY_API_SERVER_ADDRESS", help="The cluster's job server (http://HOST:8265) that has the job.")] = None,
) -> None:
    """Show how far a run is, what each role did and waited for, who holds what, and what to change first.

    It reads the run's directory alone, so it works from any machine that sees it, during the run and after. Of a job
    of a cluster it shows how that stands, and the run where this machine sees its directory.
    """
    if address and not run.is_dir():
        from rlhf_ray.cli.jobs import print_job

        print_job(str(run), address)
        return
    require_run(run)
    from rich.console import Console
    from rich.live import Live

    from rlhf_ray.observability.status_page import status_page

    console = Console(highlight=False, soft_wrap=True)
    if not watch:
        console.print(status_page(run))
        return
    with Live(status_page(run), console=console, refresh_per_second=2) as view:
        while True:
            time.sleep(2)
            view.update(status_page(run))


def scale(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")],
    generators: Annotated[int, typer.Option(min=1, help="How many generators there are to be.")],
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest wait for the answer.")] = 900.0,
) -> None:
    """Add generators to a run that goes on, or remove some, and say what happened.

    New ones are brought to the present weights before they get prompts, in a bundle more of their pool where it has no
    room; those that go finish what they have begun, or leave it to others. The run's results stay what they are, and
    --resume begins with the number that was left.
    """
    require_run(run)
    from rlhf_ray.observability.control_files import ask

    typer.echo(ask(run, "scale", {"generators": generators}, timeout_s=timeout)["said"])


def profile(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a PPO run that is going on.")],
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest wait for the step to begin and "
                                           "end.")] = 3600.0,
) -> None:
    """Profile the next step of a run: torch's profiler in learners, reference and generators, and who worked when.

    Traces, for ui.perfetto.dev, and a summary lie in RUN/profile/step_N; the report is made anew and shows them.
    """
    require_run(run)
    from rlhf_ray.observability.control_files import ask
    from rlhf_ray.observability.report import write_report

    made = ask(run, "profile", timeout_s=timeout)
    directory = run / "profile" / f"step_{made['step']}"
    report = write_report(run)
    _print_operators(json.loads((directory / "profile.json").read_text()))
    typer.echo(f"traces: {directory}\nreport: {report}")


def _print_operators(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left",
                  title=f"step {found['step']}, {found['seconds']:.3g} s")
    table.add_column("worker")
    table.add_column("operator")
    table.add_column("calls", justify="right")
    table.add_column("own ms", justify="right")
    for worker, its in sorted(found["workers"].items()):
        for i, operator in enumerate(its["operators"][:SHOWN_OPERATORS]):
            table.add_row("" if i else worker, operator["name"], f"{operator['calls']:,}", f"{operator['own_ms']:,.1f}")
    Console(highlight=False, soft_wrap=True).print(table)


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]) -> None:
    """Write report.html of a run again, from its metrics and samples."""
    require_run(run)
    from rlhf_ray.observability.report import write_report

    typer.echo(f"wrote {write_report(run)}")
