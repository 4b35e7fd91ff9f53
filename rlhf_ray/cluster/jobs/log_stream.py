"""Following what a job prints to its end, over connections that may break."""

import asyncio
import time
from collections.abc import Callable

import aiohttp

from rlhf_ray.cluster.jobs.job import Job
from rlhf_ray.cluster.jobs.server import JobServer
from rlhf_ray.errors import ClusterError, first_line

PATIENCE_S = 120.0
"""How long a server may be away before following ends; the job goes on without us."""
PAUSE_S = 1.0
SETTLING_S = 60.0
"""From the last line of a job to its end in Ray's books."""


async def follow(server: JobServer, job_id: str, show: Callable[[str], None], skip: int = 0) -> Job:
    """Show all that a job prints, beginning after its first `skip` characters; returns the job when it is over.

    A connection that breaks is made again, and nothing is shown twice.

    Raises:
        ClusterError: the server was away for two minutes.
    """
    seen, away_since = skip, None
    while True:
        try:
            position = 0
            async for text in server.tail(job_id):
                away_since = None
                new = text[max(0, seen - position):]
                position += len(text)
                if new:
                    seen = position
                    show(new)
            return await _settled(server, job_id)
        except (RuntimeError, aiohttp.ClientError, OSError, ClusterError) as error:
            away_since = away_since or time.monotonic()
            if time.monotonic() - away_since > PATIENCE_S:
                raise ClusterError(f"the job server at {server.url} has been away for {PATIENCE_S:g} s "
                                   f"({first_line(error)}); the job {job_id} may well go on without it being "
                                   "followed") from error
        await asyncio.sleep(PAUSE_S)


async def _settled(server: JobServer, job_id: str) -> Job:
    """The job, once Ray's books say that it is over."""
    until = time.monotonic() + SETTLING_S
    while True:
        job = await asyncio.to_thread(server.job, job_id)
        if job.over:
            return job
        if time.monotonic() > until:
            raise RuntimeError(f"{job_id} says no more, and is {job.standing()}")
        await asyncio.sleep(PAUSE_S / 4)
