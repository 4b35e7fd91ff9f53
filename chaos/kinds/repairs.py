"""Faults inside the repair of another one: a replaced generator that receives current weights, a restart of all
learners.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from chaos.driver_under_test import LEARNER_RESTART, POLL_S, DriverUnderTest
from chaos.evidence import Evidence, Outcome
from chaos.faults import KILL, STOP, Fault
from chaos.kind import Kind, judged
from chaos.kinds.workers import MECHANISMS, LearnerFault


@dataclass(frozen=True, kw_only=True)
class InCatchUp(Kind):
    """A generator that has been replaced gets a signal while it receives the current weights."""

    signal: int
    state: str = "catch-up"
    preceded_by: str = "generator_kill"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Wait for the catch-up of any generator, and hit it."""
        import psutil

        from chaos.victims import log_effect

        rank = await catching_up(driver)
        generators = driver.coordinator.roles.generators
        processes = generators.processes(rank)
        assert processes is not None, "it has answered"
        process = psutil.Process(processes.pid)
        driver.injected(fault, role=generators.role, rank=rank, pid=process.pid, in_state=True,
                       incarnation=generators.incarnation(rank), state="a catch-up is under way")
        with suppress(psutil.NoSuchProcess):
            process.send_signal(self.signal)
        driver.in_thread(log_effect, driver.injections, fault, process, self.signal == STOP)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """The loss that it makes longer has one line in faults.jsonl, which must say that the generator is back."""
        if not evidence.logged("confirmed", fault):
            return judged(evidence, fault, injection, "its victim neither died nor stopped")
        start = evidence.start_at(injection["time"])
        event = next((event for event in evidence.all_events if event["lost_at"] < injection["time"] < event["time"]
                      and (event["role"], event["rank"]) == (injection["role"], injection["rank"])), None)
        if event is None or event["recovery_s"] is None:
            return judged(evidence, fault, injection, "" if start and start.abrupt else "the generator is not back")
        return judged(evidence, fault, injection, recovery_s=event["time"] - injection["time"])


@dataclass(frozen=True, kw_only=True)
class LearnerInCatchUp(LearnerFault):
    """A learner's rank gets a signal while it sends the current weights to a replaced generator."""

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Wait for a catch-up, and hit the learner."""
        import psutil

        await catching_up(driver)
        (group,) = (group for group in driver.coordinator.roles.learners() if group.role == self.role)
        processes = group.processes(fault.rank)
        assert processes is not None, "it has answered"
        process = psutil.Process(processes.pid)
        driver.injected(fault, role=self.role, rank=fault.rank, pid=process.pid, in_state=True,
                       incarnation=group.incarnation(fault.rank), state="a catch-up is under way")
        await self.hit(driver, fault, group, process)
        self.confirm(driver, fault, process)


async def catching_up(driver: DriverUnderTest) -> int:
    """Wait for the rank of a generator that was replaced and is receiving weights."""
    health, role = driver.coordinator.roles.health, driver.coordinator.roles.generators.role
    while True:
        ranks = [task.worker for task in health.clock.under_way
                 if (task.role, task.phase) == (role, "publish") and (role, task.worker) in health.down]
        if ranks:
            return ranks[0]
        await asyncio.sleep(POLL_S)


@dataclass(frozen=True, kw_only=True)
class InLearnerRestart(Kind):
    """A learner's rank that has just been replaced gets a signal before all of them are ready."""

    signal: int
    state: str = LEARNER_RESTART
    moment: str = LEARNER_RESTART
    preceded_by: str = "policy_kill"
    most_delay_s: float = 2.0

    colour: ClassVar[str] = "learner"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Wait until the new process is known, and a moment longer, and hit it."""
        import psutil

        from chaos.victims import log_effect

        (group,) = (group for group in driver.coordinator.roles.learners() if group.role == self.role)
        while (processes := group.processes(fault.rank)) is None:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(fault.delay_s)
        process = psutil.Process(processes.pid)
        driver.injected(fault, role=self.role, rank=fault.rank, pid=process.pid, in_state=True,
                       incarnation=group.incarnation(fault.rank), state=self.moment)
        with suppress(psutil.NoSuchProcess):
            process.send_signal(self.signal)
        await asyncio.to_thread(log_effect, driver.injections, fault, process, self.signal == STOP)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """The learners must be restarted once more: a loop of the same driver follows."""
        if not evidence.logged("confirmed", fault):
            return judged(evidence, fault, injection, "its victim neither died nor stopped")
        start, again = evidence.start_at(injection["time"]), evidence.next_loop(injection["time"])
        if again is None or evidence.start_at(again) is not start:
            return judged(evidence, fault, injection, "the learners were not restarted once more")
        return judged(evidence, fault, injection, recovery_s=again - injection["time"])


KINDS = (
    *(InCatchUp(name=f"generator_{name}_in_catch_up", victim="generator", mechanism=MECHANISMS[signal], signal=signal,
                words=f"a generator that has been replaced is {done} while it receives the current weights")
      for name, done, signal in (("kill", "killed", KILL), ("stop", "stopped", STOP))),
    LearnerInCatchUp(name="policy_kill_in_catch_up", victim="policy_learner", mechanism="SIGKILL", state="catch-up",
                     words="a policy's rank is killed while a replaced generator receives its weights",
                     role="policy_learner", phase="", signal=KILL, preceded_by="generator_kill"),
    InLearnerRestart(name="policy_kill_in_restart", victim="policy_learner", mechanism="SIGKILL", signal=KILL,
                     role="policy_learner", words="a policy's rank is killed while all learners are restarted"),
    InLearnerRestart(name="critic_stop_in_restart", victim="critic_learner", mechanism="SIGSTOP", signal=STOP,
                     role="critic_learner", words="a critic's rank is stopped while all learners are restarted"),
)
"""Kinds of this module."""
