"""`rlhf-ray jobs`, `logs`, `stop`: runs that were submitted to a cluster."""

import shlex
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_ray.errors import ClusterError, RunInterrupted

if TYPE_CHECKING:
    from rlhf_ray.cluster.jobs.job import Job
    from rlhf_ray.cluster.jobs.server import JobServer

Address = Annotated[str | None, typer.Option(
    "--address", envvar="RAY_API_SERVER_ADDRESS", show_default="http://127.0.0.1:8265", help="Address of the cluster's "
    "job server, which is its dashboard's: http://HOST:8265.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or a run's name: its newest job.")]
AllowOpen = Annotated[bool, typer.Option(
    "--allow-open", help="Use a cluster that others can reach and that has no authentication; only where the network "
    "is closed.")]
WIDEST = 160
"""Columns of the table; a narrower terminal wraps its lines, and a pipe gets them whole."""
KILL_S = 60.0
"""For a killed job to be gone."""
DETACHED = 130
"""Exit code of a command that was left with Ctrl-C, as a shell has it."""


def jobs(
    address: Address = None, allow_open: AllowOpen = False,
    everything: Annotated[bool, typer.Option("--all", help="Also jobs that rlhf-ray did not submit.")] = False,
) -> None:
    """List the runs that were submitted to a cluster, newest first."""
    from rich.console import Console
    from rich.table import Table

    from rlhf_ray.cluster.jobs.server import connect

    found = [job for job in connect(address, allow_open).jobs() if everything or job.ours]
    if not found:
        typer.echo("no jobs; `rlhf-ray submit CONFIG` submits one")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("job", "run", "stage", "standing", "began", "took", "commit"):
        table.add_column(title, no_wrap=True)
    for job in found:
        about = job.about
        table.add_row(job.id, about.get("run", ""), about.get("stage", ""), job.describe_state(), _when(job.began),
                      _took(job), about.get("commit", "")[:12])
    console = Console(highlight=False)
    console.width = max(console.width, WIDEST)
    console.print(table, crop=False)


def logs(
    job: JobName, address: Address = None, allow_open: AllowOpen = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends; Ctrl-C ends the following "
                                         "alone. The exit code is the job's.")] = False,
) -> None:
    """Show what a submitted run printed."""
    from rlhf_ray.cluster.jobs.server import connect

    server = connect(address, allow_open)
    found = server.job(job)
    if follow:
        raise typer.Exit(follow_job(server, found.id, address))
    typer.echo(server.logs(found.id), nl=False)


def stop(
    job: JobName, address: Address = None, allow_open: AllowOpen = False,
    force: Annotated[bool, typer.Option("--force", help="Kill it at once; its last checkpoint is safe.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Show what it does until it has ended.")] = True,
) -> None:
    """Have a submitted run save a checkpoint and end; it can be gone on with."""
    from rlhf_ray.cluster.jobs.server import connect

    server = connect(address, allow_open)
    found = server.job(job)
    if found.over:
        typer.echo(f"{found.id} is over: {found.describe_state()}")
        return
    seen = len(server.logs(found.id)) if found.state == "RUNNING" else 0
    if force and found.node:
        _kill(server, found, found.node)
    elif force:
        server.stop(found.id)  # it has no process yet
    else:
        server.stop(found.id)
        typer.echo(f"asked {found.id} to stop: it finishes an update under way, saves a checkpoint and ends. Ray kills "
                   f"it after {found.about.get('stop_wait_s', '3')} s; --force does so now")
    if wait:
        follow_job(server, found.id, address, seen)


def follow_job(server: "JobServer", job_id: str, address: str | None, skip: int = 0) -> int:
    """Follow a job to its end and say how it ended; Ctrl-C ends the following alone. Returns the exit code."""
    import asyncio

    from rlhf_ray.cluster.jobs.job import KILLED
    from rlhf_ray.cluster.jobs.log_stream import follow
    from rlhf_ray.observability.progress import FollowedProgress

    at = f" --address {address}" if address else ""
    try:
        with FollowedProgress() as progress:
            job = asyncio.run(follow(server, job_id, progress.feed, skip))
    except KeyboardInterrupt:
        typer.echo(f"\n{job_id} goes on without us. Come back with: rlhf-ray logs {job_id} --follow{at}; end it with: "
                   f"rlhf-ray stop {job_id}{at}", err=True)
        return DETACHED
    typer.echo(f"{job_id}: {job.describe_state()}", err=job.exit_code != 0)
    if job.state == "FAILED" and job.code is None and job.message:
        typer.echo(job.message.strip(), err=True)  # Ray's own word of a job whose command was never run
    if job.exit_code in (RunInterrupted.exit_code, KILLED) and job.ours:
        typer.echo(f"go on with: {resume_command(job, address)}", err=True)
    return job.exit_code


def resume_command(job: "Job", address: str | None) -> str:
    """What to type to go on with a job's run."""
    return shlex.join(["rlhf-ray", "submit", *job.arguments, *(["--address", address] if address else []), "--resume"])


def print_job(name: str, address: str) -> None:
    """Say how a job stands, what it is, and how far its run is."""
    from rlhf_ray.cluster.jobs.server import connect
    from rlhf_ray.observability.progress import newest_step

    server = connect(address, allow_open=True)  # it only reads, and a token was shown to nobody who did not ask for one
    job = server.job(name)
    about = job.about
    typer.echo(f"{job.id}: {job.describe_state()}")
    for title, key in (("run", "dir"), ("stage", "stage"), ("commit", "commit"), ("configuration", "config"),
                       ("submitted by", "by")):
        if about.get(key):
            typer.echo(f"{title}: {about[key]}")
    if line := newest_step(server.logs(job.id)):
        typer.echo(line)
    if about.get("dir") and Path(about["dir"]).is_dir():
        from rich.console import Console

        from rlhf_ray.observability.status_page import status_page

        Console(highlight=False, soft_wrap=True).print(status_page(Path(about["dir"])))


def _kill(server: "JobServer", job: "Job", node: str) -> None:
    """Kill a job's driver by another job on its node, which is forgotten afterwards. The driver is not asked to stop
    before: it would begin to save what nobody waits for."""
    typer.echo(f"killing {job.id}")
    helper = server.run_on(node, f"python -m rlhf_ray.cluster.jobs.kill_driver {shlex.quote(job.id)}", job.environment)
    until = time.monotonic() + KILL_S
    while not (state := server.job(helper)).over:
        if time.monotonic() > until:
            raise ClusterError(f"nothing killed {job.id} within {KILL_S:g} s: the job {helper}, which was to do so, is "
                               f"{state.describe_state()}")
        time.sleep(0.5)
    said = server.logs(helper).strip().splitlines()[-1:]
    if state.exit_code != 0:
        raise ClusterError(f"{job.id} was not killed: the job {helper}, which was to do so, {state.describe_state()}: "
                           f"{' '.join(said) or state.message}")
    typer.echo("".join(said))
    server.forget(helper)


def _when(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds).strftime("%d %b %H:%M") if seconds else ""


def _took(job: "Job") -> str:
    from rlhf_ray.observability.progress import duration

    return duration((job.ended or time.time()) - job.began) if job.began else ""
