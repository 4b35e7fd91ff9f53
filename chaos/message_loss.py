"""Messages between the driver and its workers that get lost. Ray loses one at random, as an environment variable of the
driver asks it to; the run's own files show afterwards which one it was.
"""

from __future__ import annotations

import json
import os
from typing import Any

from chaos.faults import Fault
from chaos.run_record import RunRecord, Start
from rlhf_ray.errors import WorkerError
from rlhf_ray.internals.ray import CALL_MESSAGE, LOSE_MESSAGES, start_processes_with
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.observability.run_directory import RunDirectory

CHANCE_PERCENT = 1
"""Of each call until one is lost: most are lost in the first updates, some while workers start."""
LOST_BY_RAY = "RpcError: Unavailable"
"""In Ray's error for a message that it lost on purpose; those lost by a death name the connection's error."""


def environment(request: bool) -> dict[str, str]:
    """Environment variables of a driver that shall lose a message: a call of an actor, otherwise a reply."""
    return {LOSE_MESSAGES: json.dumps({CALL_MESSAGE: {
        "num_failures": 1, "req_failure_prob": CHANCE_PERCENT * request,
        "resp_failure_prob": CHANCE_PERCENT * (not request), "in_flight_failure_prob": 0}})}


def lose_messages_of_this_process_only() -> None:
    """Let messages of this process get lost, and none of Ray's own processes, which it is about to start and which call
    actors too when they create them."""
    if LOSE_MESSAGES not in os.environ:
        return
    start_processes_with({LOSE_MESSAGES: ""})


def lost_at_the_start(code: int, log: str) -> bool:
    """Whether a driver ended because a message got lost while its workers started, when they are not replaced."""
    return code == WorkerError.exit_code and LOST_BY_RAY in log


def log_loss(record: RunRecord, start: Start, fault: Fault) -> None:
    """Find the loss in the files of a driver that ended, and add it to the injection log. A driver that was killed
    before the worker was back has no line about it: then it shows nothing, and the fault is not injected yet."""
    log = start.log.read_text(errors="replace")
    if lost_at_the_start(start.code, log):
        record.injections.add("injected", fault=fault.number, kind=fault.kind, in_state=True, time=start.ended,
                              state="a call while workers started")
    elif (event := _loss(record, start)) is not None:
        record.injections.add("injected", fault=fault.number, kind=fault.kind, in_state=True, time=event["lost_at"],
                              role=event["role"], rank=event["rank"] or 0, state=f"a call of {event['method']}")


def _loss(record: RunRecord, start: Start) -> dict[str, Any] | None:
    """The line of faults.jsonl about the worker that should have got the message, or had sent it."""
    for event in read_faults(RunDirectory(record.directory).faults):
        if start.began <= event["lost_at"] <= start.ended and LOST_BY_RAY in event.get("reason", ""):
            return event
    return None
