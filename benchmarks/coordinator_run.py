"""One run of the real coordinator over stand-ins, in a separate process; what it cost is written as JSON.

`python -m benchmarks.coordinator_run OUT --generators 256 --roles ray` is one point of `coordinator_scale`.
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import struct
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.coordinator_groups import HostedGroup, LocalGroup, StubGroup
from benchmarks.coordinator_stubs import CHUNK, StubRoles
from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.derived import derive
from rlhf_ray.config.load import resolve
from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.config.stages import PPOConfig, role_facts
from rlhf_ray.coordinator.live_status import live_status
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.coordinator.rollout_source import PromptSource
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.spans import StepClock
from rlhf_ray.stages.evaluation_log import EvaluationLog
from rlhf_ray.stages.ppo import finalize_ledger, show_live
from rlhf_ray.stages.ppo_builder import CoordinatorBuilder
from rlhf_ray.stages.runtime import open_runtime
from rlhf_ray.workers.calls import traffic
from rlhf_ray.workers.detectors import TokenProgress
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import HealthMonitor
from rlhf_ray.workers.role_groups import RoleGroups

BATCH, STALENESS = 10_000, 4
"""Samples of a step, and η: so large that no batch waits for a generator's slowest chunk and the one behind it."""
SCORERS, HOSTS = 16, 2
TCPI_BYTES_ACKED = 120
"""Where `struct tcp_info` of linux/tcp.h holds tcpi_bytes_acked, and tcpi_bytes_received after it."""


@dataclass(frozen=True)
class Mark:
    """The coordinator's process at the end of a step."""

    samples: int
    seconds: float
    """Of the event loop's clock."""
    cpu_seconds: float
    """Of all threads."""
    thread_seconds: Mapping[str, float]
    """CPU time of the event loop's thread, of the thread that writes the ledger, and of Ray's threads."""
    rss_bytes: int
    received_bytes: int
    """Fetched by calls."""
    carried_bytes: int
    """Read and written on its connections, results that Ray passes on in messages and all envelopes included."""


class MarkingWriter(MetricsWriter):
    """Writes metrics as ever, and notes what the process has used at the end of each step."""

    def __init__(self, path: Path, config: PPOConfig, clock: Callable[[], float]) -> None:
        super().__init__(path, config.logging)
        self._clock, self._batch = clock, config.coordinator.samples_per_step
        self.marks: list[Mark] = []

    def mark(self, samples: int) -> None:
        """Note what the process has used so far."""
        used = Mark(samples, self._clock(), time.process_time(), thread_seconds(), resident_bytes(), traffic.received,
                    carried_bytes())
        self.marks.append(used)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """As `MetricsWriter.write`."""
        super().write(step, values)
        self.mark(step * self._batch)


def thread_seconds() -> dict[str, float]:
    """CPU seconds of this process by kind of thread; see `Mark`."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    kinds = {"MainThread": "event_loop", "records": "ledger"}
    seconds = dict.fromkeys((*kinds.values(), "ray"), 0.0)
    for thread in psutil.Process().threads():
        seconds[kinds.get(names.get(thread.id, ""), "ray")] += thread.user_time + thread.system_time
    return seconds


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def carried_bytes() -> int:
    """What the TCP connections of this process have carried so far, both ways, as Linux counts it."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was no socket, or is closed by now
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += sum(struct.unpack_from("QQ", info, TCPI_BYTES_ACKED))
    return total


def configuration(directory: Path, generators: int, samples: int, batch: int, local: bool) -> PPOConfig:
    """A run of stand-ins; all that matters to the coordinator is set, the rest is as ever."""
    logging = {"tensorboard": False, "ray_metrics": False} if local else {}
    return resolve(PPOConfig.model_validate({
        "run": {"dir": str(directory), "steps": samples // batch},
        "model": {"path": "stub"}, "rewards": {"main": {"type": "model", "path": "stub"}}, "prompts": {"path": "stub"},
        "generator": {"workers": generators, "chunk": CHUNK, "max_sequences": CHUNK, "cpus": 0},
        "algorithm": {"mini_batches": 1},
        "coordinator": {"prompts_per_step": batch, "max_staleness": STALENESS}, "logging": logging,
        "pools": {"default": {"cpus": HOSTS}}, "cluster": {"dashboard": False, "object_store_mb": 1536},
    }))


def role_groups_of(group: Callable[[str, int], Any], generators: int, clock: StepClock) -> RoleGroups:
    """A team with the roles of PPO with a critic."""
    workers = {"generator": generators, "reference": SCORERS, "reward": SCORERS, "assembler": SCORERS, "policy": 1,
               "critic": 1}
    facts = role_facts(PPOConfig)
    return RoleGroups({section: group(facts[section].worker, count) for section, count in workers.items()},
                      health=HealthMonitor(clock=clock))


async def run_coordinator(config: PPOConfig, roles: RoleGroups, reader: Any, live: bool) -> dict[str, Any]:
    """The whole run, wired as the stage wires it; `live` keeps status.json and watches workers as a run does.

    Returns:
        marks: of the beginning and of every step.
        ledger: samples by what became of them, when every one is accounted for.
    """
    directory = RunDirectory.create(config.run.dir)
    metrics = MarkingWriter(directory.path, config, roles.clock.now)
    prompts = PromptSource(WorkerDispatcher(reader, roles.health), "training",
                           [config.run.steps * config.coordinator.samples_per_step], [])
    with (directory.path / "progress.txt").open("w") as stream, StageProgress("", config.run.steps, 0, stream) as shown:
        builder = CoordinatorBuilder(config, derive(config), roles, WeightSync(config.weights, roles), prompts, None,
                                     directory, CheckpointStore(directory.checkpoints, 1), {}, shown,
                                     StopRequest(shown.warn))
        coordinator = builder.build(metrics, EvaluationLog(directory, None), None)
        coordinator.state.unmeasured = False
        metrics.mark(0)
        async with looked_at(coordinator, directory) if live else nothing():
            await coordinator.run()
    metrics.close()
    samples = finalize_ledger(coordinator.pipeline.ledger, coordinator.open_keys())
    return {"marks": [asdict(mark) for mark in metrics.marks], "ledger": samples}


@asynccontextmanager
async def looked_at(coordinator: Coordinator, directory: RunDirectory) -> AsyncIterator[None]:
    """What goes on beside a run: its status is written, and its workers are watched."""
    roles = coordinator.roles
    progress = TokenProgress(roles.dispatcher(roles.generators).scheduler, roles.health,
                             coordinator.config.cluster.heartbeat_timeout_s)
    show = show_live(coordinator.config, directory)
    async with live_status(lambda: coordinator, directory, show), roles.health.at_work([progress]):
        yield


@asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    """No company."""
    yield


async def over_local(config: PPOConfig) -> dict[str, Any]:
    """All ranks in this process, in a loop that jumps over waiting."""
    clock = asyncio.get_running_loop().time
    stub = StubRoles(config.run.seed, clock)
    roles = role_groups_of(lambda role, workers: LocalGroup(role, workers, stub.answer), config.generator.workers,
                           StepClock(clock))
    found = await run_coordinator(config, roles, LocalGroup("prompt_reader", 1, stub.answer), live=False)
    return {**found, "generated": await stub.generated(0)}


async def over_ray(config: PPOConfig) -> dict[str, Any]:
    """All ranks in a few Ray actors."""
    async with open_runtime(config) as runtime:
        hosts, others = (runtime.spawn(name, StubRoles, PlacementConfig(workers=HOSTS), lambda rank: {"seed": rank})
                         for name in ("generators", "others"))
        await asyncio.gather(*(group.values(StubRoles.generated, 0) for group in (hosts, others)))

        def group(role: str, workers: int) -> StubGroup:
            return HostedGroup(role, workers, hosts if role == "generator" else others)

        roles = role_groups_of(group, config.generator.workers, StepClock())
        found = await run_coordinator(config, roles, group("prompt_reader", 1), live=True)
        generated = [await call.value() for call in hosts.call_all(StubRoles.generated, 0)]
    return {**found, "generated": [span for spans in generated for span in spans]}


def measure(generators: int, samples: int, batch: int, over: str, directory: Path) -> dict[str, Any]:
    """One run, over "ray" or "local" roles."""
    config = configuration(directory / "run", generators, samples, batch, over == "local")
    if over == "local":
        found = run_in_virtual_time(over_local(config), computing_counts=True)
    else:
        with ray_session(config.cluster, config.pools, "coordinator"):
            found = asyncio.run(over_ray(config))
    return {"generators": generators, **found}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator_run", description=__doc__)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--generators", type=int, default=256)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--over", choices=("ray", "local"), default="local")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coordinator-") as directory:
        found = measure(asked.generators, asked.samples, asked.batch, asked.over, Path(directory))
    asked.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
