"""What a run is doing at this moment, kept in status.json of its directory for whoever looks from outside."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.coordinator.pipeline import Station
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.errors import DiskStalled, RLHFError, RunInterrupted, SupersededError
from rlhf_ray.observability.background_task import OnFailure, background_task, log_failure
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.spans import StepClock

EVERY_S = 2.0


@asynccontextmanager
async def live_status(
    present: Callable[[], Coordinator | None], directory: RunDirectory,
    show: Callable[[Coordinator], None] = lambda _: None, on_failure: OnFailure = log_failure,
) -> AsyncIterator[None]:
    """Write status.json every two seconds while the enclosed work goes on, and how it ended at last.

    Args:
        present: gives the run's coordinator, once there is one.
        show: shows it elsewhere, too.
        on_failure: called where the status cannot be made.
    """
    ended = "failed"
    try:
        async with background_task("the status", lambda: _keep_writing(present, directory, show), on_failure):
            yield
        coordinator = present()
        given_up = coordinator.stopped_early if coordinator else None
        ended = f"stopped early: {given_up}" if given_up else "finished"
    except BaseException as error:
        ended = how_it_ended(error)
        raise
    finally:
        if (coordinator := present()) is not None:
            # What the run itself says of its disk must come through, and of another driver that owns it by now.
            with suppress(OSError, DiskStalled, SupersededError):
                await directory.files.records.run(directory.write_json, directory.status.name,
                                                  {**snapshot(coordinator), "ended": ended})


def how_it_ended(error: BaseException) -> str:
    """An error that ended a run, in words for a person who looks from outside."""
    if isinstance(error, RunInterrupted):
        return str(error)
    said = str(error) if isinstance(error, RLHFError) else ": ".join(filter(None, (type(error).__name__, str(error))))
    return f"failed: {said}"


async def _keep_writing(
    present: Callable[[], Coordinator | None], directory: RunDirectory, show: Callable[[Coordinator], None]
) -> None:
    while True:
        if (coordinator := present()) is not None:
            with suppress(OSError):  # a disk that is full for a while: the next one may be written
                await directory.files.records.run(directory.write_json, directory.status.name, snapshot(coordinator))
            show(coordinator)
        await asyncio.sleep(EVERY_S)


def snapshot(coordinator: Coordinator) -> dict[str, Any]:
    """Step, buffer, and who works on what since when."""
    buffer, state = coordinator.buffer.stats(), coordinator.state
    return {
        "time": time.time(), "step": state.step, "steps": coordinator.config.run.steps, "samples": state.samples,
        "max_staleness": coordinator.config.coordinator.max_staleness,
        "buffer": {"ready": buffer.samples_ready, "under_way": buffer.samples_reserved,
                   "training": buffer.samples_leased, "mb": buffer.bytes / 2**20},
        "quarantined": coordinator.pipeline.quarantine.samples if coordinator.pipeline.quarantine else 0,
        "under_way": _by_worker(coordinator.roles.clock),
        "chunks": _by_station(coordinator), "leases": _leases(coordinator),
        "checkpoint": _checkpoint(coordinator),
        "down": coordinator.roles.healing.status(coordinator.roles.clock.now()),
        "workers": whereabouts(coordinator.roles),
    }


def _checkpoint(coordinator: Coordinator) -> dict[str, Any] | None:
    """The checkpoint under way: its step, for how many seconds, and the file operation of this process, if any."""
    writing = coordinator.recovery.writing
    return writing and {"step": writing.step, "seconds": round(time.monotonic() - writing.began, 1),
                        "doing": coordinator.files.checkpoints.progress.doing}


def whereabouts(roles: RoleGroups) -> list[dict[str, Any]]:
    """One line per worker that has started: its pool and bundle, the node, its process there, and its GPUs' numbers."""
    found = []
    for group in roles.everybody():
        for rank in group.ranks:
            if (processes := group.processes(rank)) is not None:
                seat = group.seat(rank)
                found.append({"worker": f"{group.role}/{rank}", "pool": seat.pool, "bundle": seat.bundle,
                              "host": processes.host, "node": processes.node, "pid": processes.pid,
                              "gpus": list(processes.gpus)})
    return found


def _by_worker(clock: StepClock) -> list[dict[str, Any]]:
    """One line per worker and kind of work: how many calls, and the age of the oldest in seconds; oldest first."""
    now, ages = clock.now(), defaultdict(list)
    for task in clock.under_way:
        ages[f"{task.role}/{task.worker}", task.phase].append(now - task.since)
    lines = [{"worker": worker, "phase": phase, "calls": len(found), "seconds": round(max(found), 3)}
             for (worker, phase), found in ages.items()]
    return sorted(lines, key=lambda line: -line["seconds"])


def _by_station(coordinator: Coordinator) -> list[dict[str, Any]]:
    """One line per kind of thing that happens to chunks: how many, the oldest of them, and for how long already."""
    found: dict[str, list[Station]] = defaultdict(list)
    for station in coordinator.pipeline.stations.values():
        found[station.doing].append(station)
    now, lines = coordinator.roles.clock.now(), []
    for doing, stations in found.items():
        oldest = min(stations, key=lambda station: station.since)
        lines.append({"doing": doing, "chunks": len(stations), "samples": sum(s.reservation.samples for s in stations),
                      "oldest": oldest.reservation.order, "version": oldest.reservation.version,
                      "seconds": round(now - oldest.since, 3)})
    return lines


def _leases(coordinator: Coordinator) -> list[dict[str, Any]]:
    """What is lent to the learners, for the update of which version, and when it would come back by itself."""
    learners = [group.role for group in coordinator.roles.learners()]
    now = coordinator.roles.clock.now()
    return [{"samples": lease.samples, "version": lease.version, "held_by": learners,
             "comes_back_in_s": round(lease.deadline - now, 1)} for lease in coordinator.buffer.leases()]
