"""Disturbances around a run for some updates: the run goes on, and ends as if there had been none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from chaos import preload
from chaos.driver_under_test import POLL_S, DriverUnderTest
from chaos.evidence import EARLY_S, Evidence, Outcome
from chaos.faults import Fault
from chaos.kind import Kind, judged
from chaos.networks import losing_packets
from chaos.requirements import COMPILER, PACKET_LOSS
from chaos.run_record import RunRecord
from rlhf_ray.checkpoint.manifest import MANIFEST_NAME
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.run_directory import RunDirectory

if TYPE_CHECKING:
    from rlhf_ray.config.stages import PPOConfig

LONGEST_S = 120.0
"""A disturbance ends by itself after this time, and must have had its effect within it."""
HOUR_S = 3600
STORE_SHARE = 3
"""The object store gets so many times its size."""
REFUSED_S = 300.0
"""Within this time a second driver must be refused; it loads its libraries meanwhile."""
POLL_EFFECT_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Disturbance(Kind):
    """Lasts until so many updates were made, and it was seen to have had its effect."""

    updates: int = 2
    shift_s: int = 0
    """How far the driver's clock is off meanwhile."""

    colour: ClassVar[str] = "disturbance"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Begin once no worker is down, and hold training at the end until the effect was seen."""
        from chaos.victims import unnoticed

        until = time.monotonic() + LONGEST_S
        while driver.repairing() or (unnoticed(driver) and time.monotonic() < until):
            await asyncio.sleep(POLL_S)
        coordinator = driver.coordinator
        step = coordinator.state.step
        driver.injected(fault, pid=os.getpid(), state=self.state, in_state=True)
        with self.disturbing(driver) as effect:
            while coordinator.state.step < step + self.updates:
                await asyncio.sleep(POLL_S)
            with driver.holding():
                until = time.monotonic() + LONGEST_S
                while not (seen := await asyncio.to_thread(effect)) and time.monotonic() < until:
                    await asyncio.sleep(POLL_EFFECT_S)
        if seen:
            driver.injections.add("confirmed", fault=fault.number, state=seen, seconds=0.0)
        step = coordinator.state.step
        while coordinator.state.step == step:
            await asyncio.sleep(POLL_S)
        driver.injections.add("recovered", fault=fault.number)
        await asyncio.sleep(2 * EARLY_S)  # so that the victim of the next fault is not counted against this one

    @contextmanager
    def disturbing(self, driver: DriverUnderTest) -> Iterator[Any]:
        """Disturb the run within the block. Yields a function that returns what has been seen of it, empty if nothing
        yet; it may take long."""
        yield lambda: ""

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """It must have been seen, and the run must have gone on without loss of a worker."""
        confirmed, recovered = (evidence.logged(event, fault) for event in ("confirmed", "recovered"))
        if confirmed is None:
            return judged(evidence, fault, injection, "nothing was seen of it")
        if recovered is None:
            return judged(evidence, fault, injection, "no update was made afterwards")
        since, until = injection["time"] - EARLY_S, recovered["time"] + EARLY_S
        for event in evidence.events:
            lost_at = event["lost_at"]
            if since <= lost_at <= until or since <= lost_at - self.shift_s <= until:
                return judged(evidence, fault, injection,
                              f"{event['role']}/{event['rank']} was lost meanwhile: {event['reason']}")
        return judged(evidence, fault, injection, self.problem_after(evidence, fault),
                      recovery_s=recovered["time"] - confirmed["time"])

    def problem_after(self, evidence: Evidence, fault: Fault) -> str:
        """Why the run did not go on as it should."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Preloaded(Disturbance):
    """A disturbance by the preloaded library."""

    requires: tuple[Any, ...] = (COMPILER,)

    def environment(self, fault: Fault) -> dict[str, str]:
        """Load it."""
        return preload.environment()

    @contextmanager
    def disturbing(self, driver: DriverUnderTest) -> Iterator[Any]:
        """Control it."""
        library = preload.Preload.of_this_process()
        self.begin(library, driver.coordinator.config)
        try:
            yield lambda: self.effect(library)
        finally:
            library.stop()

    def begin(self, library: preload.Preload, config: PPOConfig) -> None:
        """Let the library disturb the run."""
        raise NotImplementedError

    def effect(self, library: preload.Preload) -> str:
        """What has been seen of it."""
        return f"{library.hits} calls" if library.hits else ""


@dataclass(frozen=True, kw_only=True)
class ClockJump(Preloaded):
    """The wall clock of the driver jumps, and back."""

    victim: str = "driver's clock"
    state: str = "training"

    def begin(self, library: preload.Preload, config: PPOConfig) -> None:
        """Shift it."""
        library.shift_clock(os.getpid(), self.shift_s, LONGEST_S)

    def effect(self, library: preload.Preload) -> str:
        """The difference between the clock as the driver sees it, and as a process does that is not shifted."""
        code = "import time; print(time.time())"
        true = float(subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True).stdout)
        seen_s = time.time() - true
        return f"{seen_s:+.0f} s" if abs(seen_s - self.shift_s) < HOUR_S / 2 else ""


@dataclass(frozen=True, kw_only=True)
class SlowWrites(Preloaded):
    """Every write and flush below a directory takes longer."""

    mechanism: str = "slow"
    delay_s: float
    directory: str = "dir"
    """Field of the section `run` that names the directory."""

    def begin(self, library: preload.Preload, config: PPOConfig) -> None:
        """Delay them."""
        library.slow_disk(_pattern(getattr(config.run, self.directory)), self.delay_s, LONGEST_S)


@dataclass(frozen=True, kw_only=True)
class UploadFails(Preloaded):
    """Nothing can be copied to `run.upload` for a time; afterwards the copies are complete."""

    victim: str = "run.upload"
    mechanism: str = "full"
    state: str = "copying"
    updates: int = 3

    def begin(self, library: preload.Preload, config: PPOConfig) -> None:
        """Let every write fail."""
        library.fill_disk(_pattern(config.run.upload), LONGEST_S)

    def problem_after(self, evidence: Evidence, fault: Fault) -> str:
        """It must be reported, and made good."""
        if not any("copying to" in line and "failed" in line for line in evidence.logs()):
            return "the run does not report that it cannot be copied"
        return _missing_copy(evidence.record)


@dataclass(frozen=True, kw_only=True)
class StoreFull(Disturbance):
    """The object store gets more than it can hold, and has to spill."""

    victim: str = "object store"
    mechanism: str = "full"
    state: str = "training"

    @contextmanager
    def disturbing(self, driver: DriverUnderTest) -> Iterator[Any]:
        """Put objects, and keep them until the end of the block."""
        import numpy as np
        import ray

        size = driver.coordinator.config.cluster.object_store_mb or 0
        kept: list[Any] = []

        def spilled() -> str:
            while len(kept) < 2 * STORE_SHARE:
                kept.append(ray.put(np.full(size * 2**20 // 2, len(kept), np.uint8)))
            found = list(Path(os.environ["RAY_TMPDIR"]).rglob("ray_spilled_objects*/*"))
            return f"{len(kept)} objects of {size // 2} MiB put, {len(found)} files spilled" if found else ""

        try:
            yield spilled
        finally:
            kept.clear()


@dataclass(frozen=True, kw_only=True)
class SecondDriver(Disturbance):
    """Another driver is started with the same configuration and --resume: it must be refused."""

    victim: str = "run directory"
    mechanism: str = "second driver"
    state: str = "owned"

    @contextmanager
    def disturbing(self, driver: DriverUnderTest) -> Iterator[Any]:
        """Start it."""
        injections = driver.injections.path
        config = injections.with_name(injections.name.removesuffix(".injections.jsonl") + ".yaml")
        second = subprocess.Popen([sys.executable, "-m", "rlhf_ray.cli.main", "ppo", str(config), "--resume"],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        def refused() -> str:
            try:
                said, _ = second.communicate(timeout=REFUSED_S)
            except subprocess.TimeoutExpired:
                return ""
            right = second.returncode == ConfigError.exit_code and str(os.getpid()) in said
            return f"exit code {second.returncode}: {' '.join(said.split())[-200:]}" if right else ""

        try:
            yield refused
        finally:
            second.kill()
            second.wait()


@dataclass(frozen=True, kw_only=True)
class PacketLoss(Disturbance):
    """Packets between the node of the learners and the others are dropped at random."""

    share: float

    victim: str = "network"
    mechanism: str = "packet loss"
    state: str = "training"
    updates: int = 3
    requires: tuple[Any, ...] = (PACKET_LOSS,)
    runs: Mapping[str, int] = field(default_factory=lambda: {"learner_node": 1})

    @contextmanager
    def disturbing(self, driver: DriverUnderTest) -> Iterator[Any]:
        """Drop them."""
        with losing_packets(self.share) as dropped:
            yield lambda: f"{dropped()} packets dropped" if dropped() else ""


def _pattern(directory: str | None) -> str:
    """Of the paths below a directory."""
    assert directory is not None, "the run has no run.upload"
    return f"{Path(directory).resolve()}/*"


def _missing_copy(record: RunRecord) -> str:
    """Why the copies are not those of the run's newest checkpoint; empty if they are."""
    copies = upload_directory(record.directory)
    checkpoints = RunDirectory(record.directory).checkpoints
    newest = max(checkpoints.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    copy = copies / checkpoints.name / newest.name / MANIFEST_NAME
    same = copy.exists() and copy.read_bytes() == (newest / MANIFEST_NAME).read_bytes()
    return "" if same else f"{newest.name} is not complete in the copy"


def upload_directory(directory: Path) -> Path:
    """Where a run is copied to: not on its own disk."""
    return directory.parents[1] / "copies" / directory.name


KINDS = (
    ClockJump(name="clock_forward", words="the driver's clock jumps an hour ahead, and back", mechanism="jump ahead",
              shift_s=HOUR_S),
    ClockJump(name="clock_back", words="the driver's clock jumps an hour back, and ahead again", mechanism="jump back",
              shift_s=-HOUR_S),
    SlowWrites(name="disk_slow", words="every write to the run's directory takes 50 ms longer",
               victim="disk of the run", state="training", delay_s=0.05, updates=3),
    SlowWrites(name="upload_slow", words="every write to run.upload takes half a second longer", victim="run.upload",
               state="copying", delay_s=0.5, updates=3, directory="upload", runs={"uploaded": 1}),
    UploadFails(name="upload_full", words="nothing can be copied to run.upload, which is full", runs={"uploaded": 1}),
    StoreFull(name="store_full", words="the object store gets three times what it can hold"),
    PacketLoss(name="packets_lost", words="a packet in twenty between the learners and the others is lost", share=0.05),
    SecondDriver(name="second_driver", words="another driver is started on the same run directory"),
)
"""Kinds of this module."""
