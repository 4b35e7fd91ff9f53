"""Workers and learners that are killed or stopped in the middle of a call."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from chaos.driver_under_test import DriverUnderTest
from chaos.evidence import EARLY_S, Evidence, Outcome
from chaos.faults import KILL, STOP, Fault
from chaos.kind import Kind, judged
from rlhf_ray.errors import ClusterUnavailable

if TYPE_CHECKING:
    import psutil

    from rlhf_ray.workers.worker_group import WorkerGroup

MECHANISMS = {KILL: "SIGKILL", STOP: "SIGSTOP"}
NOTICING_S = 15.0
"""Longest time from a fault to the end of its driver and workers in which the driver need not have noticed it: the
heartbeats of five seconds and a quarter more, and the shutdown."""
CLUSTER_LOST_S = 60.0
"""The same if it ends because its control store is lost: it notices nothing meanwhile, and ends after about 50 s."""
LONG_CALL: dict[str, Any] = {"most_sightings": 1, "most_delay_s": 0.2}
"""Of calls that are made once or twice a step and take long."""


@dataclass(frozen=True, kw_only=True)
class WorkerFault(Kind):
    """A worker in the middle of a call gets a signal."""

    phase: str
    """The call that must be under way."""
    signal: int

    is_repaired: ClassVar[bool] = True

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Wait for the call, and hit the worker."""
        from chaos.victims import call_under_way, is_up

        clock = driver.coordinator.roles.clock
        (group,) = (group for group in driver.coordinator.roles.all_groups() if group.role == self.role)
        task, process = await call_under_way(fault, self.phase, driver.coordinator, group,
                                             lambda: self.is_spared(driver))
        worker, process = process, self.victim_process(process)
        in_state = task in clock.under_way and is_up(process) and not self.is_spared(driver)
        driver.injected(fault, role=self.role, rank=fault.rank, pid=worker.pid,
                       incarnation=group.incarnation(fault.rank), in_state=in_state,
                       state=f"{self.phase} under way for {clock.now() - task.since:.3f} s")
        driver.hit(group, fault.rank, process)
        await self.hit(driver, fault, group, process)
        self.confirm(driver, fault, process)

    def is_spared(self, driver: DriverUnderTest) -> bool:
        """Whether no fault may be injected into the victim at present."""
        return False

    def victim_process(self, process: psutil.Process) -> psutil.Process:
        """The process that is hit: the worker's own, or one that it has started."""
        return process

    async def hit(self, driver: DriverUnderTest, fault: Fault, group: WorkerGroup, process: psutil.Process) -> None:
        """Send the signal."""
        import psutil

        with suppress(psutil.NoSuchProcess):
            process.send_signal(self.signal)

    def confirm(self, driver: DriverUnderTest, fault: Fault, process: psutil.Process) -> None:
        """Let the effect be logged when it is seen."""
        from chaos.victims import log_effect

        driver.in_thread(log_effect, driver.injections, fault, process, self.signal == STOP)

    def is_mine(self, event: dict[str, Any], injection: dict[str, Any]) -> bool:
        """Whether a line of faults.jsonl, of the same driver, is about this fault."""
        return bool((event["role"], event["pid"]) == (injection["role"], injection["pid"]))

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """It must be logged as lost, confirmed to be dead or stopped, and be back."""
        if not injection["in_state"]:
            return judged(evidence, fault, injection, "its victim was not in the required state")
        start, event = evidence.start_at(injection["time"]), self.event(evidence, injection)
        if event is None:
            return judged(evidence, fault, injection, "the run never noticed")
        evidence.events.remove(event)
        problem = "" if evidence.logged("confirmed", fault) else "its victim neither died nor stopped"
        problem = problem or self.problem_after(evidence, fault)
        if event["recovery_s"] is None and start is evidence.record.starts[-1] \
                and "the run ended" not in event["outcome"]:
            problem = problem or f"it was not recovered from: {event['outcome']}"
        return judged(evidence, fault, injection, problem, max(0.0, event["lost_at"] - injection["time"]),
                      event["recovery_s"])

    def event(self, evidence: Evidence, injection: dict[str, Any]) -> dict[str, Any] | None:
        """The line of faults.jsonl about its victim, written by the driver that lost it."""
        start = evidence.start_at(injection["time"])
        return next((event for event in evidence.events if self.is_mine(event, injection)
                     and event["lost_at"] <= (start.ended if start else float("inf"))), None)

    def went_unnoticed(self, evidence: Evidence, injection: dict[str, Any]) -> bool:
        """A driver that is killed does not log the workers that were down; one that ends within seconds may not have
        noticed them."""
        start = evidence.start_at(injection["time"])
        if start is None or self.event(evidence, injection) is not None:
            return False
        longest_s = NOTICING_S + (CLUSTER_LOST_S if start.code == ClusterUnavailable.exit_code else 0.0)
        return start.abrupt or (start.code == start.expected != 0 and start.ended - injection["time"] < longest_s)

    def problem_after(self, evidence: Evidence, fault: Fault) -> str:
        """Why a fault whose victim was hit and noticed was not survived nevertheless."""
        return ""


@dataclass(frozen=True, kw_only=True)
class FaultInEvaluation(WorkerFault):
    """A worker gets a signal while the policy is evaluated."""

    def is_spared(self, driver: DriverUnderTest) -> bool:
        """Outside an evaluation."""
        return not driver.coordinator.state.unmeasured


@dataclass(frozen=True, kw_only=True)
class EngineFault(WorkerFault):
    """The process of vLLM's engine gets a signal, not the generator that has started it."""

    def victim_process(self, process: psutil.Process) -> psutil.Process:
        """The engine's; Linux cuts names after 15 letters."""
        return next(child for child in process.children(recursive=True) if "EngineCor" in child.name())


@dataclass(frozen=True, kw_only=True)
class LearnerFault(WorkerFault):
    """A learner's rank in the middle of a call gets a signal: all learners are restarted."""

    colour: ClassVar[str] = "learner"
    is_repaired: ClassVar[bool] = False

    def is_spared(self, driver: DriverUnderTest) -> bool:
        """Whether the victim is about to be replaced anyway: when one learner is lost, all are."""
        return driver.learners_lost

    async def hit(self, driver: DriverUnderTest, fault: Fault, group: WorkerGroup, process: psutil.Process) -> None:
        """Send the signal."""
        await super().hit(driver, fault, group, process)
        driver.learners_lost = True

    def is_mine(self, event: dict[str, Any], injection: dict[str, Any]) -> bool:
        """Any line about a learner counts: whichever is lost, all are restarted."""
        return bool(event["role"].endswith("_learner") and injection["time"] - EARLY_S <= event["lost_at"])


def _worker(name: str, words: str, role: str, phase: str, signal: int, state: str, synchronous: int = 1,
            overlapped: int = 0, on_nodes: int = 0, episodes: int = 0, family: type[WorkerFault] | None = None,
            **more: Any) -> WorkerFault:
    runs = {"synchronous": synchronous, "overlapped": overlapped, "generator_nodes": on_nodes, "episodes": episodes}
    family = family or (LearnerFault if role.endswith("_learner") else WorkerFault)
    runs = {run: number for run, number in runs.items() if number}
    return family(name=name, words=words, victim=role, mechanism=MECHANISMS[signal], state=state, role=role,
                  phase=phase, signal=signal, runs=runs, **more)


KINDS = (
    _worker("generator_kill", "a generator with requests in flight is killed", "generator", "generate", KILL,
            "requests in flight", 2, 2, 1, most_delay_s=0.1),
    _worker("generator_stop", "a generator with requests in flight is stopped", "generator", "generate", STOP,
            "requests in flight", 1, 1, 1, most_delay_s=0.1),
    _worker("generator_kill_in_publication", "a generator that receives new weights is killed", "generator", "publish",
            KILL, "publication", 1, 1, 1),
    _worker("reward_kill", "a reward scorer at work is killed", "reward_scorer", "reward", KILL, "at work", 1, 1),
    _worker("reward_stop", "a reward scorer at work is stopped", "reward_scorer", "reward", STOP, "at work"),
    _worker("reference_kill", "a reference scorer at work is killed", "reference_scorer", "reference", KILL, "at work",
            1, 1),
    _worker("reference_stop", "a reference scorer at work is stopped", "reference_scorer", "reference", STOP,
            "at work"),
    _worker("assembler_kill", "an assembler at work is killed", "assembler", "assemble", KILL, "at work", 1, 1),
    _worker("prompt_reader_kill", "the prompt reader is killed while it reads", "prompt_reader", "read", KILL,
            "at work", most_sightings=1),
    _worker("prompt_reader_stop", "the prompt reader is stopped while it reads", "prompt_reader", "read", STOP,
            "at work", most_sightings=1),
    _worker("generator_kill_in_evaluation", "a generator is killed in an evaluation", "generator", "generate", KILL,
            "evaluation", family=FaultInEvaluation, most_sightings=1),
    _worker("generator_stop_in_evaluation", "a generator is stopped in an evaluation", "generator", "generate", STOP,
            "evaluation", family=FaultInEvaluation, most_sightings=1),
    _worker("assembler_kill_in_evaluation", "an assembler is killed in an evaluation", "assembler", "evaluate", KILL,
            "evaluation", family=FaultInEvaluation, most_sightings=1),
    *(EngineFault(name=f"engine_{name}", words=f"vLLM's engine process of a generator at work is {done}",
                  victim="vLLM's EngineCore", mechanism=MECHANISMS[signal], state="requests in flight",
                  role="generator", phase="generate", signal=signal, runs={"async_engine": 1})
      for name, done, signal in (("kill", "killed", KILL), ("stop", "stopped", STOP))),
    _worker("policy_kill", "a policy's rank is killed in an update", "policy_learner", "policy_update", KILL, "update",
            1, 1, episodes=1, **LONG_CALL),
    _worker("policy_stop", "a policy's rank is stopped in an update", "policy_learner", "policy_update", STOP,
            "update", **LONG_CALL),
    _worker("policy_kill_in_forward", "a policy's rank is killed while it computes log-probabilities",
            "policy_learner", "logprobs", KILL, "log-probabilities", most_sightings=2),
    _worker("critic_kill", "a critic's rank is killed in an update", "critic_learner", "critic_update", KILL, "update",
            **LONG_CALL),
    _worker("critic_stop", "a critic's rank is stopped in an update", "critic_learner", "critic_update", STOP,
            "update", 1, 1, **LONG_CALL),
)
"""Kinds of this module."""
