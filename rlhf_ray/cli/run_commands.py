"""Commands that read or steer one run's directory: `rlhf-ray status`, `scale`, `profile`, `report`."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_ray.cli.jobs import AllowPlainHTTP
from rlhf_ray.cli.paths import local_path
from rlhf_ray.errors import ConfigError, DataError

WATCH_EVERY_S = 2
"""Interval of `status --watch`."""
STARTS_S = 60.0
"""How long `status --watch` waits for a run: one that was just started checks its models and data first."""
SHOWN_OPERATORS = 5
"""Operators of each worker that `rlhf-ray profile` shows."""


def require_run(run: Path) -> None:
    """Check that RUN is a directory.

    Raises:
        DataError: it is not.
    """
    if not run.is_dir():
        raise DataError(f"there is no run directory {run}; name the one that a stage wrote (its run.dir)")


def status(
    run: Annotated[Path, typer.Argument(parser=local_path, metavar="RUN",
        help="A run's directory, or one that holds several runs; or a job's id, with --address.")],
    watch: Annotated[bool, typer.Option(
        "--watch", "-w", help="Update every two seconds until the run is finished, its driver has not moved for a "
        "minute, or Ctrl-C.")] = False,
    workers: Annotated[bool, typer.Option("--workers", help="Show calls under way, leases, and each worker's node and "
                                          "process too.")] = False,
    address: Annotated[str | None, typer.Option(
        envvar="RAY_API_SERVER_ADDRESS", help="Job server of the cluster with the job (http://HOST:8265).")] = None,
    allow_plain_http: AllowPlainHTTP = False,
) -> None:
    """Show what a run has learned, one of its texts, the work and waiting times of each role, and a recommendation.

    The command reads only the run's directory, so it works on any machine that can read it, during the run and
    afterwards. For a job of a cluster it shows the job's status, and the run if this machine can read its directory.
    """
    if address and not run.is_dir():
        from rlhf_ray.cli.jobs import print_job

        print_job(str(run), address, allow_plain_http)
        return
    from rich.console import Console
    from rich.live import Live

    from rlhf_ray.observability.owner_record import read_owner
    from rlhf_ray.observability.ownership import SILENT_S
    from rlhf_ray.observability.run_directory import RunDirectory
    from rlhf_ray.observability.status_page import is_finished, runs_below, status_page

    begun, files = time.monotonic(), RunDirectory(run)
    while watch and not (read_owner(run) or files.summary.exists() or files.metrics.exists() or runs_below(run)) \
            and time.monotonic() - begun < STARTS_S:
        time.sleep(0.2)
    require_run(run)
    console = Console(highlight=False, soft_wrap=not watch)
    if not watch:
        console.print(status_page(run, workers))
        return
    with Live(status_page(run, workers), console=console, refresh_per_second=2) as view:
        finished, record, unchanged_s = is_finished(run), read_owner(run), 0
        while not finished and unchanged_s < SILENT_S:  # a live driver renews its record every few seconds
            time.sleep(WATCH_EVERY_S)
            before, finished, record = record, is_finished(run), read_owner(run)
            unchanged_s = unchanged_s + WATCH_EVERY_S if record == before else 0
            view.update(status_page(run, workers))


def scale(
    run: Annotated[Path, typer.Argument(parser=local_path, metavar="RUN", help="The run's directory.")],
    generators: Annotated[int, typer.Option(min=1, help="New number of generators.")],
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest wait for the answer.")] = 900.0,
) -> None:
    """Add generators to a run of ppo, grpo, rloo or reinforce that is under way, or remove some.

    New generators receive the present weights before they get prompts. If their pool is full, it grows by a bundle.
    Removed generators finish their calls, or other generators repeat them. The results of the run do not change, and
    --resume starts with the new number of generators.
    """
    require_run(run)
    from rlhf_ray.observability.control_files import ask

    typer.echo(ask(run, "scale", {"generators": generators}, timeout_s=timeout)["message"])


def profile(
    run: Annotated[Path, typer.Argument(parser=local_path, metavar="RUN", help="Directory of a running PPO or GRPO "
                                        "run.")],
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest wait for the start and the end "
                                           "of the step.")] = 3600.0,
) -> None:
    """Profile the next step of a run: torch's profiler in learners, reference and generators, and a timeline of calls.

    Traces for ui.perfetto.dev and a summary are written to RUN/profile/step_N, and the report is written again with
    them.
    """
    require_run(run)
    from rlhf_ray.observability.control_files import ask
    from rlhf_ray.observability.report import write_report

    profiled = ask(run, "profile", timeout_s=timeout)
    directory = run / "profile" / f"step_{profiled['step']}"
    report = write_report(run)
    _print_operators(json.loads((directory / "profile.json").read_text()))
    typer.echo(f"traces: {directory}\nreport: {report}")


def _print_operators(summary: dict[str, Any]) -> None:
    from rich.console import Console

    from rlhf_ray.observability.tables import plain_table

    table = plain_table("worker", "operator", title_justify="left",
                        title=f"step {summary['step']}, {summary['seconds']:.3g} s")
    table.add_column("calls", justify="right")
    table.add_column("own ms", justify="right")
    for worker, profile in sorted(summary["workers"].items()):
        for i, operator in enumerate(profile["operators"][:SHOWN_OPERATORS]):
            table.add_row("" if i else worker, operator["name"], f"{operator['calls']:,}", f"{operator['own_ms']:,.1f}")
    Console(highlight=False, soft_wrap=True).print(table)


def report(
    runs: Annotated[list[Path], typer.Argument(parser=local_path, metavar="RUN [RUN ...]", help="Runs' directories.")],
    output: Annotated[Path | None, typer.Option("--output", parser=local_path, metavar="PATH",
        help="Where to write the page of several runs; runs.html by default.", show_default=False)] = None,
) -> None:
    """Write report.html of a run again, from its metrics and samples; or one page with the curves of several runs."""
    for run in runs:
        require_run(run)
    if len(runs) == 1:
        if output is not None:
            raise ConfigError(f"--output {output}: the report of one run is {runs[0] / 'report.html'}; name several "
                              "runs for a page of your own")
        from rlhf_ray.observability.report import write_report

        typer.echo(f"wrote {write_report(runs[0])}")
        return
    from rlhf_ray.observability.runs_page import write_runs_page

    typer.echo(f"wrote {write_runs_page(runs, output or Path('runs.html'))}")
