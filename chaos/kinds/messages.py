"""Messages between the driver and its workers that get lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from chaos.evidence import Evidence, Outcome
from chaos.faults import Fault
from chaos.kind import Kind, judged
from chaos.message_loss import environment, log_loss, lost_at_the_start
from chaos.run_record import RunRecord, Start
from rlhf_ray.errors import WorkerError


@dataclass(frozen=True, kw_only=True)
class LostMessage(Kind):
    """Ray loses one message at random, as the environment of the next driver asks it to."""

    request: bool
    """A call, otherwise a reply."""

    colour: ClassVar[str] = "network"
    follows_an_end: ClassVar[bool] = True
    may_not_happen: ClassVar[bool] = True
    exact_event: ClassVar[bool] = True

    def environment(self, fault: Fault) -> dict[str, str]:
        """Ask Ray to lose a message."""
        return environment(self.request)

    def expected_code(self, fault: Fault, code: int, log: str) -> int | None:
        """While workers start, they are not replaced: the driver ends."""
        return WorkerError.exit_code if lost_at_the_start(code, log) else None

    def driver_ended(self, record: RunRecord, start: Start, fault: Fault) -> None:
        """Find the loss in the files of the driver."""
        log_loss(record, start, fault)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """The worker is replaced; while workers start, the driver ends instead, and the next one resumes."""
        event = next((event for event in evidence.events if event["lost_at"] == injection["time"]), None)
        if event is not None:
            evidence.events.remove(event)
            problem = "" if event["recovery_s"] is not None else f"it was not recovered from: {event['outcome']}"
            return judged(evidence, fault, injection, problem, recovery_s=event["recovery_s"])
        again = evidence.next_loop(injection["time"])
        return judged(evidence, fault, injection, "" if again else "the run was not resumed",
                      recovery_s=again and again - injection["time"])


KINDS = (
    LostMessage(name="request_lost", words="a call of the driver to a worker is lost on its way", victim="driver",
                mechanism="message lost", state="a call is sent", request=True),
    LostMessage(name="reply_lost", words="a worker's answer to the driver is lost on its way", victim="worker",
                mechanism="message lost", state="a reply is sent", request=False),
)
"""Kinds of this module."""
