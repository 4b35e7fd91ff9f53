"""Follows a job's output to its end, over connections that may break."""

import asyncio
import time
from collections.abc import Callable

import aiohttp

from rlhf_ray.cluster.jobs.job import Job
from rlhf_ray.cluster.jobs.submission_client import JobServer
from rlhf_ray.errors import ClusterError, first_line

UNREACHABLE_S = 120.0
"""Seconds for which the server may be unreachable before following ends; the job continues without it."""
PAUSE_S = 1.0
SETTLING_S = 60.0
"""Longest wait between a job's last line of output and its end in Ray's records."""


async def follow(server: JobServer, job_id: str, show: Callable[[str], None], skip: int = 0) -> Job:
    """Show everything that a job prints, after its first `skip` characters; returns the job when it has ended.

    A broken connection is made again, and nothing is shown twice.

    Raises:
        ClusterError: the server was unreachable for two minutes.
    """
    shown, unreachable_since = skip, None
    while True:
        try:
            position = 0
            async for text in server.tail(job_id):
                unreachable_since = None
                new = text[max(0, shown - position):]
                position += len(text)
                if new:
                    shown = position
                    show(new)
            return await _settled(server, job_id)
        except (RuntimeError, aiohttp.ClientError, OSError, ClusterError) as error:
            unreachable_since = unreachable_since or time.monotonic()
            if time.monotonic() - unreachable_since > UNREACHABLE_S:
                raise ClusterError(f"the job server at {server.url} has been unreachable for {UNREACHABLE_S:g} s "
                                   f"({first_line(error)}); the job {job_id} may still be running. Follow it "
                                   "again when the server answers") from error
        await asyncio.sleep(PAUSE_S)


async def _settled(server: JobServer, job_id: str) -> Job:
    """The job, once Ray's records say that it has ended."""
    until = time.monotonic() + SETTLING_S
    while True:
        job = await asyncio.to_thread(server.job, job_id)
        if job.over:
            return job
        if time.monotonic() > until:
            raise RuntimeError(f"{job_id} prints nothing more, and its state is {job.describe_state()}")
        await asyncio.sleep(PAUSE_S / 4)
