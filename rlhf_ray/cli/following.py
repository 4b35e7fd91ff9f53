"""A job's output in this terminal, until it ends or the person who looks has seen enough."""

import asyncio
import shlex

import typer

from rlhf_ray.cluster.jobs.job import KILLED, Job
from rlhf_ray.cluster.jobs.log_stream import follow
from rlhf_ray.cluster.jobs.server import JobServer
from rlhf_ray.errors import RunInterrupted
from rlhf_ray.observability.followed import FollowedProgress

DETACHED = 130
"""Exit code of a command that was left with Ctrl-C, as a shell has it."""


def follow_job(server: JobServer, job_id: str, address: str | None, skip: int = 0) -> int:
    """Follow a job to its end and say how it ended; Ctrl-C ends the following alone. Returns the exit code."""
    at = f" --address {address}" if address else ""
    try:
        with FollowedProgress() as progress:
            job = asyncio.run(follow(server, job_id, progress.feed, skip))
    except KeyboardInterrupt:
        typer.echo(f"\n{job_id} goes on without us. Come back with: rlhf-ray logs {job_id} --follow{at}; end it with: "
                   f"rlhf-ray stop {job_id}{at}", err=True)
        return DETACHED
    typer.echo(f"{job_id}: {job.standing()}", err=job.exit_code != 0)
    if job.state == "FAILED" and job.code is None and job.message:
        typer.echo(job.message.strip(), err=True)  # Ray's own word of a job whose command was never run
    if job.exit_code in (RunInterrupted.exit_code, KILLED) and job.ours:
        typer.echo(f"go on with: {resume_command(job, address)}", err=True)
    return job.exit_code


def resume_command(job: Job, address: str | None) -> str:
    """What to type to go on with a job's run."""
    return shlex.join(["rlhf-ray", "submit", *job.arguments, *(["--address", address] if address else []), "--resume"])
