"""The operating system's processes of a worker, and how they are killed.

Ray ends an actor by a request to its process, which a stopped process does not receive, and it does not know the
processes that a role has started (vLLM's engine runs in one of its own). So each worker reports all of its processes,
and they are killed by pid before the worker is restarted.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_ray.cluster.shared_memory import made_by, remove_unused

GONE_S = 5.0
"""Time for the system to remove a killed process; one in the middle of a write to disk takes a moment."""
ELSEWHERE_S = 60.0
"""Longest wait for another node to kill processes: Ray starts a process there for it."""
LOST_LOOK_S = 1.0
"""Interval of the checks whether that node is lost in the meantime."""


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Children and their children that are alive, without Python's resource trackers, which live as long as the process
    and clean up after killed ones."""
    return [child for child in process.children(recursive=True) if _counts(child)]


def _counts(process: psutil.Process) -> bool:
    try:
        return not any("resource_tracker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:  # it has ended meanwhile, or is a zombie
        return False


@dataclass(frozen=True)
class Processes:
    """A worker's process and all processes that it has started."""

    node: str
    """Ray's id of their node."""
    members: tuple[tuple[int, float], ...]
    """(pid, start time) of each: unique together, whereas a pid alone is used again."""
    host: str = ""
    """Address of that node."""
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs assigned to the worker on that node."""

    @property
    def pid(self) -> int:
        """Pid of the worker itself."""
        return self.members[0][0]


def own_processes() -> Processes:
    """Processes of this worker, without Python's resource trackers, which clean up after killed processes."""
    own = psutil.Process()
    found = [own, *descendants(own)]
    return Processes(ray.get_runtime_context().get_node_id(), tuple((p.pid, p.create_time()) for p in found),
                     ray.util.get_node_ip_address(), tuple(map(str, ray.get_gpu_ids())))


def kill(
    members: Iterable[tuple[int, float]], grace_s: float = 0.0, end: Callable[[], None] | None = None
) -> list[int]:
    """Kill processes of this host (stopped ones too) and their descendants, and remove shared memory that only they
    used.

    Args:
        grace_s: time for them to end after `end`, or after an earlier request to stop.
        end: called once their shared memory is known; it may kill them, and the resource trackers that would remove it.

    Returns:
        pids that still exist a few seconds later.
    """
    doomed: dict[int, psutil.Process] = {}
    first = time.time()
    for pid, began in members:
        first = min(first, began)
        try:
            process = psutil.Process(pid)
            if process.create_time() == began:
                doomed[pid] = process
                doomed |= {child.pid: child for child in descendants(process)}
        except psutil.NoSuchProcess:
            continue
    segments = made_by(doomed, first)
    if end is not None:
        end()
    _, alive = psutil.wait_procs(doomed.values(), timeout=grace_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(alive, timeout=GONE_S)
    remove_unused(segments)
    return [process.pid for process in alive]


async def kill_on_their_node(processes: Processes) -> None:
    """`kill` on the node of the processes. A node that cannot be reached has lost its processes or will end them: Ray
    declares it dead, and its raylet exits when it learns of that."""
    if is_here(processes):
        await asyncio.to_thread(kill, processes.members)
        return
    tasks = [asyncio.ensure_future(_killed(processes)), asyncio.ensure_future(_lost(processes.node))]
    try:
        done, _ = await asyncio.wait(tasks, timeout=ELSEWHERE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _killed(processes: Processes) -> None:
    there = NodeAffinitySchedulingStrategy(processes.node, soft=False)
    with suppress(ray.exceptions.RayError):
        await ray.remote(num_cpus=0, max_retries=0)(kill).options(scheduling_strategy=there).remote(processes.members)


async def _lost(node: str) -> None:
    """Wait until Ray declares a node dead. A task on a node that stands still does not always return by then."""
    while any(one["NodeID"] == node and one["Alive"] for one in await asyncio.to_thread(ray.nodes)):
        await asyncio.sleep(LOST_LOOK_S)


def is_here(processes: Processes) -> bool:
    """Whether the processes are on this node."""
    return bool(processes.node == ray.get_runtime_context().get_node_id())
