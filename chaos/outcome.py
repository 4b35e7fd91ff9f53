"""What became of each fault: was its victim in the state that was meant, was it struck, and did the run get over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from chaos.kinds import KINDS, REFUSED
from chaos.plan import Fault
from chaos.refusals import left_by_name
from chaos.supervisor import ChaosRun, Start
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.observability.run_directory import RunDirectory

PASSED_OVER, RAN_FULL = "passing over a damaged checkpoint", ("ran full", "disk is full", "disk full")
LEFT_OUT = "left out: a loss or gradient was not finite"
EARLY_S = 0.5
"""By so much an event may seem to be before its cause: it is placed by subtracting durations."""


@dataclass(frozen=True)
class Outcome:
    """One fault and what came of it."""

    run: str
    fault: Fault
    state: str
    """Of the victim when it was struck."""
    detection_s: float | None = None
    recovery_s: float | None = None
    """From its detection (a driver's end) to normal work."""
    problem: str = ""
    """Why the fault does not count as survived; empty if it does."""
    injected: bool = True

    @property
    def survived(self) -> bool:
        """Whether the run got over it."""
        return self.injected and not self.problem


def outcomes(record: ChaosRun) -> list[Outcome]:
    """Of every fault of the plan, in its order."""
    struck = {told["fault"]: told for told in record.strikes.read("struck")}
    events = read_faults(RunDirectory(record.directory).faults)
    found = []
    lost = {number: _taken(events, told) for number, told in struck.items() if _is_lost_message(told)}
    for fault in record.faults:
        told = struck.get(fault.number)
        if told is None:
            found.append(Outcome(record.config.stem, fault, "", problem="its moment never came", injected=False))
        elif fault.what.target == "checkpoint":
            found.append(_of_damage(record, fault, told))
        elif fault.what.target == "network":
            found.append(_of_lost_message(record, fault, told, lost[fault.number]))
        elif fault.what.target in ("service", "numbers"):
            found.append(_of_failure(record, fault, told))
        elif fault.what.ends_the_driver:
            found.append(_of_driver(record, fault, told))
        else:
            found.append(_of_worker(record, fault, told, events))
    return [_in_the_air(record, outcome) for outcome in found] if record.interruption else found


def _in_the_air(record: ChaosRun, outcome: Outcome) -> Outcome:
    """Of a run that was interrupted: what it had not got over by then says nothing."""
    if outcome.recovery_s is not None and not outcome.problem:
        return outcome
    last = record.starts[-1].began
    told = next((line for line in record.strikes.read("struck") if line["fault"] == outcome.fault.number), None)
    if told is not None and told["time"] < last - EARLY_S and not outcome.problem:
        return outcome
    return replace(outcome, injected=False, problem="the run was interrupted before it was over")


def _of_worker(record: ChaosRun, fault: Fault, told: dict[str, Any], events: list[dict[str, Any]]) -> Outcome:
    start, run = _start_at(record, told["time"]), record.config.stem
    confirmed = fault.number in {line["fault"] for line in record.strikes.read("confirmed")}
    event = _event(fault, told, events, start)
    if not told["in_state"]:
        return Outcome(run, fault, told["state"], problem="its victim was not in the state that was meant")
    if event is None:
        # A driver that dies does not tell of workers that were down.
        problem = "" if start and start.abrupt else "the run never noticed"
        return Outcome(run, fault, told["state"], problem=problem)
    events.remove(event)  # it is no other fault's
    problem = "" if confirmed else "its victim neither died nor stopped"
    if fault.what.comes_back and not _is_mended(record, fault):
        problem = problem or "what was cut off was not stopped until it was replaced, or did not end when it was back"
    if event["recovery_s"] is None and start is record.starts[-1] and "the run ended" not in event["outcome"]:
        problem = problem or f"it was not made good: {event['outcome']}"
    return Outcome(run, fault, told["state"], max(0.0, event["lost_at"] - told["time"]), event["recovery_s"], problem)


def _event(fault: Fault, told: dict[str, Any], events: Sequence[dict[str, Any]],
           start: Start | None) -> dict[str, Any] | None:
    """The run's own line about it. All learners are one: whichever of them is told of, all are built again."""
    until = start.ended if start else float("inf")
    for event in events:
        if fault.what.target == "learner":
            mine = event["role"].endswith("_learner") and told["time"] - EARLY_S <= event["lost_at"] <= until
        else:
            mine = (event["role"], event["pid"]) == (told["role"], told["pid"])
        if mine:
            return event
    return None


def _is_lost_message(told: dict[str, Any]) -> bool:
    return KINDS[told["kind"]].target == "network"


def _taken(events: list[dict[str, Any]], told: dict[str, Any]) -> dict[str, Any] | None:
    """The run's line about a lost message, which is no other fault's."""
    event = next((event for event in events if event["lost_at"] == told["time"]), None)
    if event is not None:
        events.remove(event)
    return event


def _of_lost_message(record: ChaosRun, fault: Fault, told: dict[str, Any], event: dict[str, Any] | None) -> Outcome:
    """The worker that it was for is replaced; while workers start the driver ends, and its successor goes on."""
    if event is not None:
        problem = "" if event["recovery_s"] is not None else f"it was not made good: {event['outcome']}"
        return Outcome(record.config.stem, fault, told["state"], recovery_s=event["recovery_s"], problem=problem)
    again = next((line["time"] for line in record.strikes.read("loop") if line["time"] > told["time"]), None)
    return Outcome(record.config.stem, fault, told["state"], recovery_s=again and again - told["time"],
                   problem="" if again else "the run did not go on")


def _of_failure(record: ChaosRun, fault: Fault, told: dict[str, Any]) -> Outcome:
    """Of a service, which is asked again, or a number: it is over when a request is answered well, a step applied."""
    failed, recovered = (next((line for line in record.strikes.read(event) if line["fault"] == fault.number), None)
                      for event in ("confirmed", "recovered"))
    if failed is None or recovered is None:
        what = "request" if fault.what.target == "service" else "loss"
        good = "request was answered well" if fault.what.target == "service" else "optimizer step was applied"
        problem = f"no {what} met it" if failed is None else f"no {good} afterwards"
        return Outcome(record.config.stem, fault, told["state"], problem=problem)
    return Outcome(record.config.stem, fault, told["state"], recovery_s=recovered["time"] - failed["time"],
                   problem=_not_as_it_should(record, fault, failed))


def _not_as_it_should(record: ChaosRun, fault: Fault, failed: dict[str, Any]) -> str:
    """Where a failure changes the results: why it did not do so as the run promises."""
    if fault.kind == REFUSED:
        return "" if left_by_name(record, failed["prompt"]) else f"no prompt {failed['prompt']!r} left the run by name"
    return "" if not fault.what.changes_results or _left_out(record, failed) else "no optimizer step was left out"


def _is_mended(record: ChaosRun, fault: Fault) -> bool:
    return any(line["fault"] == fault.number for line in record.strikes.read("recovered"))


def _left_out(record: ChaosRun, failed: dict[str, Any]) -> bool:
    """Whether the run says that steps were left out: of that update, where it is known which."""
    begins = f"step {failed['step']}: " if "step" in failed else "step "
    lines = (line for start in record.starts for line in start.log.read_text(errors="replace").splitlines())
    return any(begins in line and LEFT_OUT in line for line in lines)


def _of_driver(record: ChaosRun, fault: Fault, told: dict[str, Any]) -> Outcome:
    start, run = _start_at(record, told["time"]), record.config.stem
    if start is None or start.code != start.expected:
        code = start.code if start else "no code"
        return Outcome(run, fault, told["state"], problem=f"the driver ended with {code}, which is not this fault's")
    said = start.log.read_text(errors="replace")
    if fault.what.target == "disk" and ("Traceback" in said or not any(words in said for words in RAN_FULL)):
        return Outcome(run, fault, told["state"], problem="the driver does not say in a message that the disk is full")
    again = next((line["time"] for line in record.strikes.read("loop") if line["time"] > start.ended), None)
    if again is None:
        return Outcome(run, fault, told["state"], problem="the run did not go on")
    return Outcome(run, fault, told["state"], recovery_s=again - start.ended)


def _of_damage(record: ChaosRun, fault: Fault, told: dict[str, Any]) -> Outcome:
    after = next((start for start in record.starts if start.began > told["time"]), None)
    said = after is not None and PASSED_OVER in after.log.read_text(errors="replace")
    problem = "" if said else "the damaged checkpoint was not passed over"
    return Outcome(record.config.stem, fault, told["state"], problem=problem)


def _start_at(record: ChaosRun, time: float) -> Start | None:
    return next((start for start in record.starts if start.began <= time <= start.ended), None)
