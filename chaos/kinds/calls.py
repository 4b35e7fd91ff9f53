"""Calls of the driver to workers that are made twice, and replies that come when nobody waits for them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chaos.driver_under_test import POLL_S, DriverUnderTest
from chaos.evidence import Evidence, Outcome
from chaos.faults import STOP, Fault
from chaos.kind import Kind, judged
from chaos.kinds.workers import WorkerFault

if TYPE_CHECKING:
    from rlhf_ray.workers.calls import Call
    from rlhf_ray.workers.worker_group import WorkerGroup


@dataclass(frozen=True, kw_only=True)
class RepeatedCall(Kind):
    """A call is made twice, as if the first request had been sent again although it had arrived."""

    method: str
    whole_group: bool = False
    """Whether every worker of the group gets its call twice, for calls that all make together."""
    mechanism: str = "called twice"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Repeat the next call of the method, and wait until it has been answered twice."""
        group = _group(driver, self.role)
        wanted = set(group.ranks) if self.whole_group else {fault.rank}
        calls: dict[int, tuple[Call[Any], Call[Any]]] = {}
        original = group.call

        def call_twice(rank: int, method: Any, *arguments: Any, **settings: Any) -> Call[Any]:
            call = original(rank, method, *arguments, **settings)
            if method.__name__ == self.method and rank in wanted - calls.keys():
                if not calls:
                    driver.injected(fault, role=self.role, rank=rank, in_state=True, state=f"{self.method} was called")
                calls[rank] = call, original(rank, method, *arguments, **settings)
            return call

        group.call = call_twice  # type: ignore[method-assign, assignment]
        try:
            while calls.keys() < wanted:
                await asyncio.sleep(POLL_S)
        finally:
            del group.call
        for _, second in calls.values():
            await second.done()
        step = driver.coordinator.state.step
        driver.injections.add("confirmed", fault=fault.number, state=f"{len(calls)} calls made twice", seconds=0.0)
        while driver.coordinator.state.step == step:
            await asyncio.sleep(POLL_S)
        driver.injections.add("recovered", fault=fault.number)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """Both calls must have been answered, and training have gone on. That nothing was trained on twice is checked
        by the invariants."""
        answered, went_on = (evidence.logged(event, fault) for event in ("confirmed", "recovered"))
        problem = "" if went_on else "no update was made afterwards"
        return judged(evidence, fault, injection, problem if answered else "the second call was not answered")


@dataclass(frozen=True, kw_only=True)
class LateReply(WorkerFault):
    """A worker's reply reaches the driver when the worker has been given up, because it gave no sign of life."""

    method: str
    mechanism: str = "reply late"
    signal: int = STOP

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Hold the reply to the next call back, and stop the worker; release the reply when it has been given up."""
        import psutil

        group = _group(driver, self.role)
        while (processes := group.processes(fault.rank)) is None or (self.role, fault.rank) in \
                driver.coordinator.roles.health.down:
            await asyncio.sleep(POLL_S)
        process, original = psutil.Process(processes.pid), group.call
        held: list[Call[Any]] = []

        def stop(call: Call[Any]) -> None:
            driver.injected(fault, role=self.role, rank=fault.rank, pid=process.pid, in_state=True,
                           incarnation=group.incarnation(fault.rank), state=f"{self.method} was answered")
            with suppress(psutil.NoSuchProcess):
                process.suspend()

        def call_and_hold(rank: int, method: Any, *arguments: Any, **settings: Any) -> Call[Any]:
            call = original(rank, method, *arguments, **settings)
            if method.__name__ == self.method and rank == fault.rank and not held:
                held.append(call)
                return replace(call, timing=_Held(call, stop))  # type: ignore[arg-type]
            return call

        group.call = call_and_hold  # type: ignore[method-assign, assignment]
        try:
            while not held or held[0].fence.closed is None:
                await asyncio.sleep(POLL_S)
        finally:
            del group.call
        value = await held[0].timing
        driver.injections.add("confirmed", fault=fault.number, state=f"given up, its reply says {value:.3f} s",
                             seconds=0.0)


class _Held:
    """A reply that is there, but is not handed out before its worker has been given up."""

    def __init__(self, call: Call, arrived: Callable[[Call], None]) -> None:
        self._call, self._arrived = call, arrived

    def __await__(self) -> Generator[Any, None, Any]:
        return self._released().__await__()

    async def _released(self) -> Any:
        value = await self._call.timing
        self._arrived(self._call)
        while self._call.fence.closed is None:
            await asyncio.sleep(POLL_S)
        return value


def _group(driver: DriverUnderTest, role: str) -> WorkerGroup:
    (group,) = (group for group in driver.coordinator.roles.all_groups() if group.role == role)
    return group


KINDS = (
    RepeatedCall(name="generate_twice", words="a call that generates is made twice", victim="generator",
                 role="generator", state="generate", method="generate"),
    RepeatedCall(name="update_twice", words="a call that updates the policy is made twice to every rank",
                 victim="policy_learner", role="policy_learner", state="update", method="update", whole_group=True),
    LateReply(name="reply_late", words="a reference scorer's reply comes after it was given up",
              victim="reference_scorer", role="reference_scorer", state="answered", phase="reference",
              method="logprobs"),
)
"""Kinds of this module."""
