"""Ray's own processes on the head node: its control store (GCS), and all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from chaos.driver_under_test import POLL_S, UPDATES_MEANWHILE, DriverUnderTest
from chaos.evidence import Evidence, Outcome
from chaos.faults import Fault
from chaos.kind import Kind, judged
from chaos.kinds.drivers import DriverEnd
from chaos.nodes import Nodes
from rlhf_ray.errors import ClusterUnavailable

if TYPE_CHECKING:
    import psutil

LEAST_DELAY_S = 0.25
"""An answer that takes less longer than usual was not delayed."""
CONTROL_STORE, RAYLET = "gcs_server", "raylet"


def ray_processes(*names: str) -> list[psutil.Process]:
    """Ray's processes with these names that this process has started, the oldest first: the head's come before those of
    other nodes."""
    import psutil

    found = [child for child in psutil.Process().children(recursive=True) if child.name() in names]
    return sorted(found, key=lambda process: process.create_time())


async def while_busy(driver: DriverUnderTest) -> str:
    """Wait until workers are at work; returns what they do, in words."""
    clock = driver.coordinator.roles.clock
    while not clock.under_way:
        await asyncio.sleep(POLL_S)
    return "waiting for " + ", ".join(sorted({f"{task.role} ({task.phase})" for task in clock.under_way}))


@dataclass(frozen=True, kw_only=True)
class HeadKilled(DriverEnd):
    """Processes of the head are killed: the driver ends some time later, by itself, and can be resumed."""

    processes: Sequence[str]
    """Names of the processes."""

    mechanism: str = "SIGKILL"
    state: str = "workers at work"
    updates: int = UPDATES_MEANWHILE

    exit_code: ClassVar[int] = ClusterUnavailable.exit_code

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Kill them."""
        state = await while_busy(driver)
        victims = [next(iter(ray_processes(name))) for name in self.processes]
        driver.injected(fault, pids=[victim.pid for victim in victims], in_state=True, state=state)
        for victim in victims:
            victim.kill()
        await driver.hold_until(asyncio.Event().wait())  # the driver ends


@dataclass(frozen=True, kw_only=True)
class ControlStoreStopped(Kind):
    """The control store is stopped for some time. The run must go on."""

    seconds: float

    victim: str = "Ray's control store"
    mechanism: str = "SIGSTOP"
    updates: int = UPDATES_MEANWHILE

    colour: ClassVar[str] = "driver"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Stop it; a thread continues it."""
        state = await while_busy(driver)
        (store,) = ray_processes(CONTROL_STORE)
        driver.injected(fault, pid=store.pid, in_state=True, state=state)
        store.suspend()
        await driver.hold_until(driver.in_thread(self._continue, driver, fault, store))

    def _continue(self, driver: DriverUnderTest, fault: Fault, store: psutil.Process) -> None:
        import psutil
        import ray

        began = time.monotonic()
        time.sleep(self.seconds)
        if store.status() == psutil.STATUS_STOPPED:
            stopped = time.monotonic() - began
            driver.injections.add("confirmed", fault=fault.number, seconds=stopped,
                                  state=f"stopped for {stopped:.0f} s")
        store.resume()
        ray.nodes()  # it answers again
        driver.injections.add("recovered", fault=fault.number)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """It must have been stopped, and the same driver must go on."""
        stopped, recovered = (evidence.logged(event, fault) for event in ("confirmed", "recovered"))
        if stopped is None or recovered is None:
            problem = "it was not stopped for so long" if stopped is None else "it did not answer again"
            return judged(evidence, fault, injection, problem)
        return judged(evidence, fault, injection, recovery_s=recovered["time"] - stopped["time"])


@dataclass(frozen=True, kw_only=True)
class LinkDisturbed(Kind):
    """The link of the driver to the control store is slow, or cut, for some time. The run must go on."""

    command: str
    """For the relay between them."""
    seconds: float

    victim: str = "link of the driver to the control store"
    updates: int = UPDATES_MEANWHILE
    runs: Mapping[str, int] = field(default_factory=lambda: {"learner_node": 1})

    colour: ClassVar[str] = "network"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Disturb the link; a thread ends that."""
        state = await while_busy(driver)
        assert driver.nodes is not None, "this run has a relay"
        driver.injected(fault, in_state=True, state=state)
        await driver.hold_until(driver.in_thread(self._disturb, driver, fault, driver.nodes))

    def _disturb(self, driver: DriverUnderTest, fault: Fault, nodes: Nodes) -> None:
        import ray

        usual_s = _seconds_of(ray.nodes)
        nodes.link.command(self.command)
        began = time.monotonic()
        with ThreadPoolExecutor(1) as executor:
            answer = executor.submit(_seconds_of, ray.nodes)
            time.sleep(self.seconds)
            disturbed_s = answer.result(0) if answer.done() else self.seconds
            nodes.link.command("pass")
            answer.result()
        if disturbed_s > max(usual_s, LEAST_DELAY_S):
            driver.injections.add("confirmed", fault=fault.number, seconds=time.monotonic() - began,
                                 state=f"an answer took {disturbed_s:.2f} s or more instead of {usual_s:.2f} s")
        driver.injections.add("recovered", fault=fault.number)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """Answers must have been slower, and the same driver must go on."""
        disturbed, recovered = (evidence.logged(event, fault) for event in ("confirmed", "recovered"))
        if disturbed is None:
            return replace(judged(evidence, fault, injection, "no answer was slower"), injected=False)
        if recovered is None:
            return judged(evidence, fault, injection, "the control store did not answer again")
        return judged(evidence, fault, injection, recovery_s=recovered["time"] - disturbed["time"])


def _seconds_of(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


@dataclass(frozen=True, kw_only=True)
class LinkCut(DriverEnd):
    """The link of the driver to the control store is cut for good: the driver ends by itself, and can be resumed."""

    victim: str = "link of the driver to the control store"
    mechanism: str = "cut"
    state: str = "for good"
    updates: int = UPDATES_MEANWHILE
    runs: Mapping[str, int] = field(default_factory=lambda: {"learner_node": 1})

    exit_code: ClassVar[int] = ClusterUnavailable.exit_code

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Cut the link."""
        state = await while_busy(driver)
        assert driver.nodes is not None, "this run has a relay"
        driver.injected(fault, in_state=True, state=state)
        driver.nodes.link.command("cut")
        await driver.hold_until(asyncio.Event().wait())  # the driver ends


KINDS = (
    HeadKilled(name="control_store_kill", victim="Ray's control store", processes=(CONTROL_STORE,),
               words="Ray's control store is killed; --resume"),
    HeadKilled(name="head_kill", victim="head node", processes=(RAYLET, CONTROL_STORE), runs={"learner_node": 1},
               words="Ray's processes on the head node are killed; --resume"),
    LinkDisturbed(name="control_link_slow", mechanism="slow", state="for 20 s", command="slow 0.3", seconds=20.0,
                  words="messages between the driver and Ray's control store take 0.3 s longer for 20 s"),
    LinkDisturbed(name="control_link_cut_20", mechanism="cut", state="for 20 s", command="cut", seconds=20.0,
                  words="the driver is cut off from Ray's control store for 20 s"),
    LinkCut(name="control_link_cut", words="the driver is cut off from Ray's control store for good; --resume"),
    *(ControlStoreStopped(name=f"control_store_stop_{seconds}", words=f"Ray's control store is stopped for {seconds} s",
                          state=f"for {seconds} s", seconds=seconds) for seconds in (30, 90)),
)
"""Kinds of this module."""
