"""The outcome of each fault: whether its victim was in the required state, was hit, and whether the run survived it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from chaos.faults import KINDS, REFUSED, Fault
from chaos.invariants import was_quarantined
from chaos.run_record import RunRecord, Start
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.observability.run_directory import RunDirectory

SKIPPED, DISK_FULL = "skipping a damaged checkpoint", ("ran full", "disk is full", "disk full")
LEFT_OUT = "left out: a loss or gradient was not finite"
EARLY_S = 0.5
"""An event may seem to precede its cause by this much: its time is computed from durations."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one fault."""

    run: str
    fault: Fault
    state: str
    """The victim's state when the fault was injected."""
    detection_s: float | None = None
    recovery_s: float | None = None
    """From its detection (for a driver: from its end) until work continues."""
    problem: str = ""
    """Why the fault does not count as survived; empty if it does."""
    injected: bool = True

    @property
    def survived(self) -> bool:
        """Whether the run survived it."""
        return self.injected and not self.problem


def outcomes(record: RunRecord) -> list[Outcome]:
    """The outcome of every fault of the plan, in its order."""
    injected = {line["fault"]: line for line in record.injections.read("injected")}
    events = read_faults(RunDirectory(record.directory).faults)
    found = []
    lost = {number: _take_event(events, line) for number, line in injected.items() if _is_lost_message(line)}
    for fault in record.faults:
        injection = injected.get(fault.number)
        if injection is None:
            problem = "its required state was never reached"
            found.append(Outcome(record.config.stem, fault, "", problem=problem, injected=False))
        elif fault.details.target == "checkpoint":
            found.append(_of_damage(record, fault, injection))
        elif fault.details.target == "network":
            found.append(_of_lost_message(record, fault, injection, lost[fault.number]))
        elif fault.details.target in ("service", "numbers"):
            found.append(_of_failure(record, fault, injection))
        elif fault.details.ends_the_driver:
            found.append(_of_driver(record, fault, injection))
        else:
            found.append(_of_worker(record, fault, injection, events))
    return [_if_over(record, outcome) for outcome in found] if record.interruption else found


def _if_over(record: RunRecord, outcome: Outcome) -> Outcome:
    """For a run that was interrupted: a fault that it had not survived by then does not count."""
    if outcome.recovery_s is not None and not outcome.problem:
        return outcome
    last = record.starts[-1].began
    logged = next((line for line in record.injections.read("injected") if line["fault"] == outcome.fault.number), None)
    if logged is not None and logged["time"] < last - EARLY_S and not outcome.problem:
        return outcome
    return replace(outcome, injected=False, problem="the run was interrupted before it recovered")


def _of_worker(record: RunRecord, fault: Fault, injection: dict[str, Any], events: list[dict[str, Any]]) -> Outcome:
    start, run = _start_at(record, injection["time"]), record.config.stem
    confirmed = fault.number in {line["fault"] for line in record.injections.read("confirmed")}
    event = _event(fault, injection, events, start)
    if not injection["in_state"]:
        return Outcome(run, fault, injection["state"], problem="its victim was not in the required state")
    if event is None:
        # A driver that is killed does not log the workers that were down.
        problem = "" if start and start.abrupt else "the run never noticed"
        return Outcome(run, fault, injection["state"], problem=problem)
    events.remove(event)  # it belongs to no other fault
    problem = "" if confirmed else "its victim neither died nor stopped"
    if fault.details.comes_back and not _has_recovered(record, fault):
        problem = problem or "the node was not stopped until its worker was replaced, or did not end when it was back"
    if event["recovery_s"] is None and start is record.starts[-1] and "the run ended" not in event["outcome"]:
        problem = problem or f"it was not recovered from: {event['outcome']}"
    detection_s = max(0.0, event["lost_at"] - injection["time"])
    return Outcome(run, fault, injection["state"], detection_s, event["recovery_s"], problem)


def _event(fault: Fault, injection: dict[str, Any], events: Sequence[dict[str, Any]],
           start: Start | None) -> dict[str, Any] | None:
    """The line of faults.jsonl about it. For learners any line counts: whichever is lost, all are restarted."""
    until = start.ended if start else float("inf")
    for event in events:
        if fault.details.target == "learner":
            mine = event["role"].endswith("_learner") and injection["time"] - EARLY_S <= event["lost_at"] <= until
        else:
            mine = (event["role"], event["pid"]) == (injection["role"], injection["pid"])
        if mine:
            return event
    return None


def _is_lost_message(injection: dict[str, Any]) -> bool:
    return KINDS[injection["kind"]].target == "network"


def _take_event(events: list[dict[str, Any]], injection: dict[str, Any]) -> dict[str, Any] | None:
    """Remove and return the line of faults.jsonl about a lost message, so that it counts for no other fault."""
    event = next((event for event in events if event["lost_at"] == injection["time"]), None)
    if event is not None:
        events.remove(event)
    return event


def _of_lost_message(record: RunRecord, fault: Fault, injection: dict[str, Any],
                     event: dict[str, Any] | None) -> Outcome:
    """The worker is replaced; while workers start, the driver ends instead, and the next one resumes."""
    if event is not None:
        problem = "" if event["recovery_s"] is not None else f"it was not recovered from: {event['outcome']}"
        return Outcome(record.config.stem, fault, injection["state"], recovery_s=event["recovery_s"], problem=problem)
    again = next((line["time"] for line in record.injections.read("loop") if line["time"] > injection["time"]), None)
    return Outcome(record.config.stem, fault, injection["state"], recovery_s=again and again - injection["time"],
                   problem="" if again else "the run was not resumed")


def _of_failure(record: RunRecord, fault: Fault, injection: dict[str, Any]) -> Outcome:
    """For a reward service or a NaN: it is over when a request succeeds, or an optimizer step is applied."""
    failed, recovered = (next((line for line in record.injections.read(event) if line["fault"] == fault.number), None)
                      for event in ("confirmed", "recovered"))
    if failed is None or recovered is None:
        what = "request" if fault.details.target == "service" else "loss"
        good = "request succeeded" if fault.details.target == "service" else "optimizer step was applied"
        problem = f"it hit no {what}" if failed is None else f"no {good} afterwards"
        return Outcome(record.config.stem, fault, injection["state"], problem=problem)
    return Outcome(record.config.stem, fault, injection["state"], recovery_s=recovered["time"] - failed["time"],
                   problem=_problem_with_results(record, fault, failed))


def _problem_with_results(record: RunRecord, fault: Fault, failed: dict[str, Any]) -> str:
    """For a failure that changes the results: why it did not do so as documented."""
    if fault.kind == REFUSED:
        return "" if was_quarantined(record, failed["prompt"]) else f"prompt {failed['prompt']!r} was not quarantined"
    return "" if not fault.details.changes_results or _left_out(record, failed) else "no optimizer step was left out"


def _has_recovered(record: RunRecord, fault: Fault) -> bool:
    return any(line["fault"] == fault.number for line in record.injections.read("recovered"))


def _left_out(record: RunRecord, failed: dict[str, Any]) -> bool:
    """Whether the run logs that optimizer steps were skipped: in that update, where it is known."""
    begins = f"step {failed['step']}: " if "step" in failed else "step "
    lines = (line for start in record.starts for line in start.log.read_text(errors="replace").splitlines())
    return any(begins in line and LEFT_OUT in line for line in lines)


def _of_driver(record: RunRecord, fault: Fault, injection: dict[str, Any]) -> Outcome:
    start, run = _start_at(record, injection["time"]), record.config.stem
    if start is None or start.code != start.expected:
        code = start.code if start else "no code"
        problem = f"the driver ended with {code}, which this fault does not cause"
        return Outcome(run, fault, injection["state"], problem=problem)
    log = start.log.read_text(errors="replace")
    if fault.details.target == "disk" and ("Traceback" in log or not any(words in log for words in DISK_FULL)):
        return Outcome(run, fault, injection["state"], problem="the driver does not report that the disk is full")
    again = next((line["time"] for line in record.injections.read("loop") if line["time"] > start.ended), None)
    if again is None:
        return Outcome(run, fault, injection["state"], problem="the run was not resumed")
    return Outcome(run, fault, injection["state"], recovery_s=again - start.ended)


def _of_damage(record: RunRecord, fault: Fault, injection: dict[str, Any]) -> Outcome:
    after = next((start for start in record.starts if start.began > injection["time"]), None)
    passed_over = after is not None and SKIPPED in after.log.read_text(errors="replace")
    problem = "" if passed_over else "the damaged checkpoint was not passed over"
    return Outcome(record.config.stem, fault, injection["state"], problem=problem)


def _start_at(record: RunRecord, time: float) -> Start | None:
    return next((start for start in record.starts if start.began <= time <= start.ended), None)
