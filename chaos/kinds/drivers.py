"""Ends of the driver, after which the run is resumed: signals, failpoints, a full disk."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from chaos.driver_under_test import LEARNER_RESTART, POLL_S, RESUME, DriverUnderTest
from chaos.evidence import Evidence, Outcome
from chaos.faults import HUP, KILL, STOP, TERM, Fault
from chaos.kind import Kind, judged
from chaos.mounts import fill_disk, free_disk
from chaos.nodes import HEARTBEAT_TIMEOUT_S
from chaos.requirements import MOUNTS
from chaos.run_record import RunRecord, Start
from rlhf_ray.errors import CheckpointError, RunInterrupted
from rlhf_ray.failpoints import EXIT_CODE, POINTS, VARIABLE

DISK_FULL = ("ran full", "disk is full", "disk full")


@dataclass(frozen=True, kw_only=True)
class DriverEnd(Kind):
    """The driver ends, and the run is resumed."""

    victim: str = "driver"

    colour: ClassVar[str] = "driver"
    ends_the_driver: ClassVar[bool] = True
    exit_code: ClassVar[int]
    """With which it ends."""
    without_effect: ClassVar[str] = ""
    """What is wrong if the injection log does not confirm the effect; empty if it never does."""

    def expected_code(self, fault: Fault, code: int, log: str) -> int | None:
        """That of this kind."""
        return self.exit_code

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """The driver must end with the code that this fault causes, and the next one begin its loop."""
        if self.without_effect and evidence.logged("confirmed", fault) is None:
            return judged(evidence, fault, injection, self.without_effect)
        start = evidence.start_at(injection["time"])
        if start is None or start.code != start.expected:
            code = start.code if start else "no code"
            return judged(evidence, fault, injection, f"the driver ended with {code}, which this fault does not cause")
        if problem := self.problem_with_output(start.log.read_text(errors="replace")):
            return judged(evidence, fault, injection, problem)
        again = evidence.next_loop(start.ended)
        if again is None:
            return judged(evidence, fault, injection, "the run was not resumed")
        return judged(evidence, fault, injection, recovery_s=again - start.ended)

    def problem_with_output(self, log: str) -> str:
        """Why what the driver printed does not fit this fault."""
        return ""


@dataclass(frozen=True, kw_only=True)
class DriverSignal(DriverEnd):
    """The driver gets a signal while it waits for workers, or at a moment outside the training loop."""

    signal: int
    state: str = "waiting for workers"
    most_delay_s: float = 1.0

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Send the signal."""
        await asyncio.sleep(fault.delay_s)
        while not (state := self.reached_state(driver)):
            await asyncio.sleep(POLL_S)
        driver.injected(fault, pid=os.getpid(), state=state)
        os.kill(os.getpid(), self.signal)

    def reached_state(self, driver: DriverUnderTest) -> str:
        """The required state in words; empty if it is not reached at present."""
        if self.moment:
            return self.moment
        busy = sorted({f"{task.role} ({task.phase})" for task in driver.coordinator.roles.clock.under_way})
        return "waiting for " + ", ".join(busy) if busy else ""

    def expected_code(self, fault: Fault, code: int, log: str) -> int | None:
        """That of the signal; a request to stop ends with its own."""
        return -KILL if self.signal == KILL else RunInterrupted.exit_code


@dataclass(frozen=True, kw_only=True)
class DriverSignalInEvaluation(DriverSignal):
    """The driver gets a signal while the policy is evaluated."""

    def reached_state(self, driver: DriverUnderTest) -> str:
        """Calls of the evaluation under way."""
        waiting = super().reached_state(driver) if driver.coordinator.state.unmeasured else ""
        return waiting and f"in an evaluation, {waiting}"


@dataclass(frozen=True, kw_only=True)
class DriverStopped(Kind):
    """The driver is stopped for longer than the heartbeat timeout, and continues."""

    seconds: float

    colour: ClassVar[str] = "driver"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Stop this process; a child continues it."""
        while not driver.coordinator.roles.clock.under_way:
            await asyncio.sleep(POLL_S)
        busy = sorted({f"{task.role} ({task.phase})" for task in driver.coordinator.roles.clock.under_way})
        began = time.monotonic()
        pid = os.getpid()
        with subprocess.Popen(["sh", "-c", f"sleep {self.seconds:g}; kill -CONT {pid}"]):
            driver.injected(fault, pid=pid, in_state=True, state="waiting for " + ", ".join(busy))
            os.kill(pid, STOP)
        stopped = time.monotonic() - began
        if stopped >= self.seconds:
            driver.injections.add("confirmed", fault=fault.number, seconds=stopped,
                                  state=f"stopped for {stopped:.1f} s")
        await asyncio.sleep(HEARTBEAT_TIMEOUT_S)  # detectors look at the workers again
        driver.injections.add("recovered", fault=fault.number)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """It must have been stopped and go on, and blame no worker for the time."""
        stopped, recovered = (evidence.logged(event, fault) for event in ("confirmed", "recovered"))
        if stopped is None or recovered is None:
            return judged(evidence, fault, injection, "it was not stopped" if stopped is None else "it did not go on")
        blamed = [f"{event['role']}/{event['rank']}" for event in evidence.events
                  if event["kind"] == "hung" and injection["time"] <= event["lost_at"] <= recovered["time"]]
        return judged(evidence, fault, injection, f"{', '.join(blamed)} counted as hung" if blamed else "",
                      recovery_s=recovered["time"] - stopped["time"])


@dataclass(frozen=True, kw_only=True)
class FailpointExit(DriverEnd):
    """The driver exits at a failpoint."""

    failpoint: str
    mechanism: str = "exit"

    exit_code: ClassVar[int] = EXIT_CODE

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Arm the failpoint."""
        driver.injected(fault, pid=os.getpid(), state=f"failpoint {self.failpoint} armed")
        os.environ[VARIABLE] = f"{self.failpoint}:exit:{min(fault.sightings, 2)}"


@dataclass(frozen=True, kw_only=True)
class DiskFull(DriverEnd):
    """The disk of the run is filled, and freed when the driver has ended."""

    exit_code: ClassVar[int] = CheckpointError.exit_code

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Fill the disk."""
        directory = Path(driver.coordinator.config.run.dir).parent
        driver.injected(fault, pid=os.getpid(), state="about to be filled")
        fill_disk(directory)

    def driver_ended(self, record: RunRecord, start: Start, fault: Fault) -> None:
        """Free the disk."""
        free_disk(record.directory.parent)

    def problem_with_output(self, log: str) -> str:
        """The driver must say that the disk is full."""
        if "Traceback" in log or not any(words in log for words in DISK_FULL):
            return "the driver does not report that the disk is full"
        return ""


KINDS = (
    DriverSignal(name="driver_kill", words="the driver is killed at a random moment; --resume", mechanism="SIGKILL",
                 signal=KILL, runs={"synchronous": 1, "overlapped": 1}),
    DriverSignal(name="driver_term", words="the driver gets SIGTERM; --resume", mechanism="SIGTERM", signal=TERM),
    DriverSignal(name="driver_hup", words="the driver's terminal is closed; --resume", mechanism="SIGHUP", signal=HUP),
    DriverSignalInEvaluation(name="driver_kill_in_evaluation", words="the driver is killed in an evaluation; --resume",
                             mechanism="SIGKILL", signal=KILL, state="evaluation", most_delay_s=0.0),
    DriverSignal(name="driver_kill_in_learner_restart", mechanism="SIGKILL", signal=KILL, state=LEARNER_RESTART,
                 words="the driver is killed while learners are restarted; --resume", moment=LEARNER_RESTART,
                 preceded_by="policy_kill", most_delay_s=5.0),
    DriverSignal(name="driver_kill_in_resume", words="the driver is killed while it resumes a run; --resume",
                 mechanism="SIGKILL", signal=KILL, state=RESUME, moment=RESUME, preceded_by="driver_term",
                 most_delay_s=0.3),
    DriverStopped(name="driver_stop", words="the driver is stopped for twice the heartbeat timeout", victim="driver",
                  mechanism="SIGSTOP", state="waiting for workers", seconds=2 * HEARTBEAT_TIMEOUT_S),
    *(FailpointExit(name=f"exit_at_{name}", words=f"the driver ends where {words}; --resume", failpoint=name,
                    state=name, runs={"synchronous": 1} | ({"overlapped": 1} if name == "checkpoint_copied" else {}))
      for name, words in POINTS.items()),
    DiskFull(name="disk_full", words="the disk is filled, and freed when the driver has ended; --resume",
             victim="disk of the run", mechanism="full", state="any writer", requires=(MOUNTS,)),
)
"""Kinds of this module."""
