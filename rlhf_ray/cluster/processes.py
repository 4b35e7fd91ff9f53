"""The operating system's processes behind a worker, and their certain end.

Ray ends an actor by asking its process, which one that is stopped does not hear, and knows nothing of processes that a
role has started (vLLM's engine runs in one of its own). So a worker names them all, and whoever restarts it kills them.
"""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_ray.cluster.shared_memory import made_by, remove_unused

GONE_S = 5.0
"""How long the system gets to take away a killed process; one in the middle of a write to a disk needs a moment."""
ELSEWHERE_S = 60.0
"""Longest wait for another node to kill: it starts a process for that."""
LOST_LOOK_S = 1.0
"""Between two looks whether that node is lost meanwhile."""


@dataclass(frozen=True)
class Processes:
    """A worker's process and all that it has started."""

    node: str
    """Ray's id of the node they are on."""
    members: tuple[tuple[int, float], ...]
    """(pid, when it began): together they name a process for good, while pids alone are used again."""
    host: str = ""
    """Address of that node."""
    gpus: tuple[str, ...] = ()
    """Numbers of the GPUs that it was given there."""

    @property
    def pid(self) -> int:
        """The worker's own."""
        return self.members[0][0]


def own_processes() -> Processes:
    """Those of this process; without Python's resource trackers, which clean up after processes that were killed."""
    own = psutil.Process()
    found = [own, *(child for child in own.children(recursive=True) if not _tidies_up(child))]
    return Processes(ray.get_runtime_context().get_node_id(), tuple((p.pid, p.create_time()) for p in found),
                     ray.util.get_node_ip_address(), tuple(map(str, ray.get_gpu_ids())))


def kill(members: Iterable[tuple[int, float]], patience_s: float = 0.0) -> list[int]:
    """Kill processes of this host, stopped ones too, with all that they have started since, and remove the shared
    memory that they made and alone used.

    Args:
        patience_s: what they get to end by themselves, having been asked before.

    Returns:
        pids of those that are still there after some seconds.
    """
    doomed: dict[int, psutil.Process] = {}
    first = time.time()
    for pid, began in members:
        first = min(first, began)
        try:
            process = psutil.Process(pid)
            if process.create_time() == began:
                doomed[pid] = process
                doomed |= {child.pid: child for child in process.children(recursive=True) if not _tidies_up(child)}
        except psutil.NoSuchProcess:
            continue
    segments = made_by(doomed, first)
    _, alive = psutil.wait_procs(doomed.values(), timeout=patience_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(alive, timeout=GONE_S)
    remove_unused(segments)
    return [process.pid for process in alive]


async def kill_on_their_node(processes: Processes) -> None:
    """`kill`, wherever they are. A node that cannot be asked has lost its processes, or will end them itself: Ray
    declares it dead, and it exits when it hears so."""
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
    """Wait until Ray takes a node for dead. What was asked of one that stands still is not always answered then."""
    while any(one["NodeID"] == node and one["Alive"] for one in await asyncio.to_thread(ray.nodes)):
        await asyncio.sleep(LOST_LOOK_S)


def is_here(processes: Processes) -> bool:
    """Whether they are on this process's node."""
    return bool(processes.node == ray.get_runtime_context().get_node_id())


def _tidies_up(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return True
