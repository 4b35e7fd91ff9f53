"""`rlhf-ray jobs`, `logs`, `stop`: runs that were submitted to a cluster."""

import shlex
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_ray.errors import ClusterError

if TYPE_CHECKING:
    from rlhf_ray.cluster.jobs.job import Job
    from rlhf_ray.cluster.jobs.submission_client import JobServer

Address = Annotated[str | None, typer.Option(
    "--address", envvar="RAY_API_SERVER_ADDRESS", show_default="http://127.0.0.1:8265", help="Address of the cluster's "
    "job server, the same as its dashboard's: http://HOST:8265.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or the name of a run, for its newest job.")]
AllowOpen = Annotated[bool, typer.Option(
    "--allow-open", help="Use a cluster that others can reach and that has no authentication; only on a closed "
    "network.")]
AllowPlainHTTP = Annotated[bool, typer.Option(
    "--allow-plain-http", help="Send the cluster's token to another machine without encryption; only on a closed "
    "network.")]
WIDEST = 160
"""Width of the table; a narrower terminal wraps its lines."""
KILL_S = 60.0
"""Timeout for a killed job to end."""
DETACHED = 130
"""Exit code of a command interrupted by Ctrl-C, as in a shell."""


def jobs(
    address: Address = None, allow_open: AllowOpen = False,
    allow_plain_http: AllowPlainHTTP = False,
    everything: Annotated[bool, typer.Option("--all", help="Also jobs that rlhf-ray did not submit.")] = False,
) -> None:
    """List the runs that were submitted to a cluster, newest first."""
    from rich.console import Console

    from rlhf_ray.cluster.jobs.submission_client import connect
    from rlhf_ray.observability.tables import plain_table

    found = [job for job in connect(address, allow_open, allow_plain_http).jobs() if everything or job.ours]
    if not found:
        typer.echo("no jobs; `rlhf-ray submit CONFIG` submits one")
        return
    table = plain_table()
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
    allow_plain_http: AllowPlainHTTP = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends; Ctrl-C stops following, "
                                         "not the job. The exit code is the job's.")] = False,
) -> None:
    """Show the output of a submitted run."""
    from rlhf_ray.cluster.jobs.submission_client import connect

    server = connect(address, allow_open, allow_plain_http)
    found = server.job(job)
    if follow:
        raise typer.Exit(follow_job(server, found.id, address))
    typer.echo(server.logs(found.id), nl=False)


def stop(
    job: JobName, address: Address = None, allow_open: AllowOpen = False,
    allow_plain_http: AllowPlainHTTP = False,
    force: Annotated[bool, typer.Option("--force", help="Kill it at once; its last checkpoint remains valid.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Show its output until it has ended.")] = True,
) -> None:
    """Let a submitted run save a checkpoint and end; it can be resumed."""
    from rlhf_ray.cluster.jobs.submission_client import connect

    server = connect(address, allow_open, allow_plain_http)
    found = server.job(job)
    if found.over:
        typer.echo(f"{found.id} is over: {found.describe_state()}")
        return
    seen = len(server.logs(found.id)) if found.state == "RUNNING" else 0
    if force and found.node:
        _kill(server, found, found.node)
    elif force:
        server.stop(found.id)  # there is no process yet
    else:
        server.stop(found.id)
        typer.echo(f"asked {found.id} to stop: it finishes the current update, saves a checkpoint and ends. Ray kills "
                   f"it after {found.about.get('stop_wait_s', '3')} s; --force does so now")
    if wait:
        follow_job(server, found.id, address, seen)


def follow_job(server: "JobServer", job_id: str, address: str | None, skip: int = 0) -> int:
    """Print a job's output until it ends, then its outcome; Ctrl-C stops following, not the job. Returns the exit
    code."""
    import asyncio

    from rlhf_ray.cluster.jobs.log_stream import follow
    from rlhf_ray.observability.progress import FollowedProgress

    at = f" --address {address}" if address else ""
    try:
        with FollowedProgress() as progress:
            job = asyncio.run(follow(server, job_id, progress.feed, skip))
    except KeyboardInterrupt:
        typer.echo(f"\n{job_id} keeps running. Follow it again with: rlhf-ray logs {job_id} --follow{at}; end it with: "
                   f"rlhf-ray stop {job_id}{at}", err=True)
        return DETACHED
    typer.echo(f"{job_id}: {job.describe_state()}", err=job.exit_code != 0)
    if job.state == "FAILED" and job.code is None and job.message:
        typer.echo(job.message.strip(), err=True)  # Ray's message about a job whose command never started
    if job.resumable:
        typer.echo(f"resume with: {resume_command(job, address)}", err=True)
    return job.exit_code


def resume_command(job: "Job", address: str | None) -> str:
    """The command that resumes a job's run."""
    return shlex.join(["rlhf-ray", "submit", *job.arguments, *(["--address", address] if address else []), "--resume"])


def print_job(name: str, address: str, allow_plain_http: bool) -> None:
    """Print a job's state, its details, and the progress of its run."""
    from rlhf_ray.cluster.jobs.submission_client import connect
    from rlhf_ray.observability.progress import newest_step

    server = connect(address, True, allow_plain_http)  # read-only, and no token is sent unasked
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
    """Kill a job's driver by another job on its node, which is deleted afterwards. The driver gets no request to stop
    first, because it would start to save."""
    typer.echo(f"killing {job.id}")
    command = f"python -P -m rlhf_ray.cluster.jobs.kill_driver {shlex.quote(job.id)}"
    helper = server.run_on(node, command, job.environment)
    until = time.monotonic() + KILL_S
    while not (state := server.job(helper)).over:
        if time.monotonic() > until:
            raise ClusterError(f"{job.id} was not killed within {KILL_S:g} s: the killing job {helper} is "
                               f"{state.describe_state()}")
        time.sleep(0.5)
    last_line = server.logs(helper).strip().splitlines()[-1:]
    if state.exit_code != 0:
        raise ClusterError(f"{job.id} was not killed: the killing job {helper} {state.describe_state()}: "
                           f"{' '.join(last_line) or state.message}")
    typer.echo("".join(last_line))
    server.forget(helper)


def _when(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds).strftime("%d %b %H:%M") if seconds else ""


def _took(job: "Job") -> str:
    from rlhf_ray.observability.progress import duration

    return duration((job.ended or time.time()) - job.began) if job.began else ""
