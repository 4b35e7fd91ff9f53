"""Messages between the driver and its workers that get lost. Ray itself loses one at random, as an environment variable
of the driver asks it to; which one is known afterwards, from what the run says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chaos.plan import Fault
from rlhf_ray.errors import WorkerError
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.observability.run_directory import RunDirectory

if TYPE_CHECKING:
    from chaos.supervisor import ChaosRun, Start

VARIABLE = "RAY_testing_rpc_failure"
CALL = "CoreWorkerService.grpc_client.PushTask"
"""Ray's name for the message by which a method of an actor is called."""
CHANCE_PERCENT = 1
"""Of each call until one is lost: most are lost in the first updates, some while workers start."""
SAID = "RpcError: Unavailable"
"""In Ray's words for a message that it lost itself; those lost by a death name the connection's error."""


def lossy(faults: Sequence[Fault]) -> Fault | None:
    """The first fault of a driver that is a lost message; a driver has one at most."""
    return next((fault for fault in faults if fault.what.target == "network"), None)


def environment(faults: Sequence[Fault]) -> dict[str, str]:
    """What the driver's environment must have for its fault."""
    fault = lossy(faults)
    if fault is None:
        return {}
    request = fault.kind == "request_lost"
    return {VARIABLE: json.dumps({CALL: {
        "num_failures": 1, "req_failure_prob": CHANCE_PERCENT * request,
        "resp_failure_prob": CHANCE_PERCENT * (not request), "in_flight_failure_prob": 0}})}


def lossy_here_only() -> None:
    """Let messages of this process get lost, and none of Ray's own processes, which it is about to start and which call
    actors too when they make them."""
    if VARIABLE not in os.environ:
        return
    from ray._private import services

    start = services.start_ray_process

    def start_reliably(*args: Any, env_updates: dict[str, str] | None = None, **settings: Any) -> Any:
        return start(*args, env_updates={**(env_updates or {}), VARIABLE: ""}, **settings)

    services.start_ray_process = start_reliably


def lost_at_the_start(faults: Sequence[Fault], code: int, log: str) -> bool:
    """Whether a driver ended since a message got lost while its workers started, when nobody replaces them."""
    return lossy(faults) is not None and code == WorkerError.exit_code and SAID in log


def note_loss(record: ChaosRun, start: Start, faults: Sequence[Fault]) -> None:
    """Find the loss in what a driver left, and add it to the strikes."""
    fault = lossy(faults)
    if fault is None:
        return
    log = start.log.read_text(errors="replace")
    if lost_at_the_start(faults, start.code, log):
        record.strikes.add("struck", fault=fault.number, kind=fault.kind, in_state=True, time=start.ended,
                           state="a call while workers started")
    elif (event := _loss(record, start)) is not None:
        record.strikes.add("struck", fault=fault.number, kind=fault.kind, in_state=True, time=event["lost_at"],
                           role=event["role"], rank=event["rank"] or 0, state=f"a call of {event['method']}")
    elif start.abrupt and SAID in log:
        record.strikes.add("struck", fault=fault.number, kind=fault.kind, in_state=True, time=start.ended,
                           state="a call; the driver ended before the worker was back")


def _loss(record: ChaosRun, start: Start) -> dict[str, Any] | None:
    """The run's line about the worker that the message was for, or came from."""
    for event in read_faults(RunDirectory(record.directory).faults):
        if start.began <= event["lost_at"] <= start.ended and SAID in event.get("reason", ""):
            return event
    return None
