"""status.json: the present activity of a run, written to its directory every two seconds for other processes."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.errors import DiskStalled, RLHFError, RunInterrupted, SupersededError
from rlhf_ray.observability.background_task import OnFailure, background_task, log_failure
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.spans import StepClock
from rlhf_ray.replay.chunk import Chunk, Phase
from rlhf_ray.workers.role_groups import RoleGroups

EVERY_S = 2.0


@asynccontextmanager
async def live_status(
    present: Callable[[], Coordinator | None], directory: RunDirectory,
    show: Callable[[Coordinator], None] = lambda _: None, on_failure: OnFailure = log_failure,
) -> AsyncIterator[None]:
    """Write status.json every two seconds during the block, and finally how the run ended.

    Args:
        present: returns the run's coordinator, once there is one.
        show: displays the status elsewhere, too.
        on_failure: called when the status cannot be created.
    """
    ended = "failed"
    try:
        async with background_task("the status", lambda: _keep_writing(present, directory, show), on_failure):
            yield
        coordinator = present()
        reason = coordinator.stopped_early if coordinator else None
        ended = f"stopped early: {reason}" if reason else "finished"
    except BaseException as error:
        ended = how_it_ended(error)
        raise
    finally:
        if (coordinator := present()) is not None:
            # The run's own error about its disk, or about another driver that owns it, must not be replaced.
            with suppress(OSError, DiskStalled, SupersededError):
                await directory.files.records.run(directory.write_json, directory.status.name,
                                                  {**snapshot(coordinator), "ended": ended})


def how_it_ended(error: BaseException) -> str:
    """The text in status.json about an error that ended the run."""
    if isinstance(error, RunInterrupted):
        return str(error)
    text = str(error) if isinstance(error, RLHFError) else ": ".join(filter(None, (type(error).__name__, str(error))))
    return f"failed: {text}"


async def _keep_writing(
    present: Callable[[], Coordinator | None], directory: RunDirectory, show: Callable[[Coordinator], None]
) -> None:
    while True:
        if (coordinator := present()) is not None:
            with suppress(OSError):  # the disk may be full for a while; the next status may be written
                await directory.files.records.run(directory.write_json, directory.status.name, snapshot(coordinator))
            show(coordinator)
        await asyncio.sleep(EVERY_S)


def snapshot(coordinator: Coordinator) -> dict[str, Any]:
    """The contents of status.json: step, buffer, workers and their calls."""
    buffer = coordinator.buffer.stats()
    state = coordinator.state
    return {
        "time": time.time(), "step": state.step, "steps": coordinator.config.run.steps, "samples": state.samples,
        "max_staleness": coordinator.config.coordinator.max_staleness,
        "reference": coordinator.derived.reference_in_words,
        "buffer": {"ready": buffer.samples_ready, "under_way": buffer.samples_reserved,
                   "training": buffer.samples_leased, "mb": buffer.bytes / 2**20},
        "quarantined": coordinator.pipeline.quarantine.samples if coordinator.pipeline.quarantine else 0,
        "under_way": _by_worker(coordinator.roles.clock),
        "chunks": _by_phase(coordinator), "leases": _leases(coordinator),
        "checkpoint": _checkpoint(coordinator),
        "down": coordinator.roles.health.status(coordinator.roles.clock.now()),
        "workers": worker_locations(coordinator.roles),
        **({} if coordinator.episodes is None else {"episodes": coordinator.episodes.status()}),
    }


def _checkpoint(coordinator: Coordinator) -> dict[str, Any] | None:
    """The checkpoint under way: its step, for how many seconds, and the file operation of this process, if any."""
    writing = coordinator.recovery.writing
    return writing and {"step": writing.step, "seconds": round(time.monotonic() - writing.began, 1),
                        "doing": coordinator.files.checkpoints.progress.doing}


def worker_locations(roles: RoleGroups) -> list[dict[str, Any]]:
    """One line per worker that has started: its pool and bundle, the node, its process there, and its GPUs' numbers."""
    found = []
    for group in roles.all_groups():
        for rank in group.ranks:
            if (processes := group.processes(rank)) is not None:
                seat = group.seat(rank)
                found.append({"worker": f"{group.role}/{rank}", "pool": seat.pool, "bundle": seat.bundle,
                              "host": processes.host, "node": processes.node, "pid": processes.pid,
                              "gpus": list(processes.gpus)})
    return found


def _by_worker(clock: StepClock) -> list[dict[str, Any]]:
    """One line per worker and kind of work: how many calls, and the age of the oldest in seconds; oldest first."""
    now = clock.now()
    ages = defaultdict(list)
    for task in clock.under_way:
        ages[f"{task.role}/{task.worker}", task.phase].append(now - task.since)
    lines = [{"worker": worker, "phase": phase, "calls": len(found), "seconds": round(max(found), 3)}
             for (worker, phase), found in ages.items()]
    return sorted(lines, key=lambda line: -line["seconds"])


def _by_phase(coordinator: Coordinator) -> list[dict[str, Any]]:
    """One line per phase of chunks: how many, the oldest of them, and for how many seconds."""
    by_phase: dict[Phase, list[Chunk]] = defaultdict(list)
    for chunk in coordinator.buffer.under_way():
        if chunk.phase is not Phase.ADMITTED:
            by_phase[chunk.phase].append(chunk)
    now = coordinator.roles.clock.now()
    lines = []
    for phase, chunks in by_phase.items():
        oldest = min(chunks, key=lambda chunk: chunk.since)
        lines.append({"doing": phase, "chunks": len(chunks), "samples": sum(chunk.samples for chunk in chunks),
                      "oldest": oldest.place.plain(), "version": oldest.version,
                      "seconds": round(now - oldest.since, 3)})
    return lines


def _leases(coordinator: Coordinator) -> list[dict[str, Any]]:
    """Leases of the learners: samples, and version of the update."""
    learners = [group.role for group in coordinator.roles.learners()]
    return [{"samples": lease.samples, "version": lease.version, "held_by": learners}
            for lease in coordinator.buffer.leases()]
