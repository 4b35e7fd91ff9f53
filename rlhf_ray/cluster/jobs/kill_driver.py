"""`python -m rlhf_ray.cluster.jobs.kill_driver JOB`: kill all processes of a job's driver on this node.

Ray's own way to stop a job waits for the time set when it was submitted, which cannot be shortened. So another job, on
the driver's node, runs this module.
"""

import os
import sys
import time
from contextlib import suppress

import psutil

from rlhf_ray.internals.ray import job_of_process

TIMEOUT_S = 30.0
"""A process in the middle of a write to a disk that hangs cannot be killed, and this one must end nevertheless."""


def processes_of(job_id: str) -> list[psutil.Process]:
    """Processes on this node whose environment says that they belong to the job's driver, except this one."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ValueError):
            if job_of_process(process.environ()) == job_id:
                processes.append(process)
    return [process for process in processes if process.pid != os.getpid()]


def kill(job_id: str) -> int:
    """Kill the processes until none is left, for half a minute at most; returns how many there were."""
    killed: set[int] = set()
    until = time.monotonic() + TIMEOUT_S
    while (alive := processes_of(job_id)) and time.monotonic() < until:
        for process in alive:
            killed.add(process.pid)
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
        if not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]:
            break
    return len(killed)


if __name__ == "__main__":
    sys.stdout.write(f"killed {kill(sys.argv[1])} processes of {sys.argv[1]}\n")
