"""The reader of the driver's output ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos.evidence import Evidence, Outcome
from chaos.faults import Fault
from chaos.kind import ON_REQUEST, judged
from chaos.kinds.drivers import DriverEnd
from chaos.lost_output import break_output
from chaos.scene import POLL_S, Scene
from rlhf_ray.errors import RunInterrupted

UPDATES = 3
"""So many updates must be made without output, before the run is asked to stop."""


@dataclass(frozen=True, kw_only=True)
class OutputLost(DriverEnd):
    """Nobody reads the driver's output any more; it goes on for some updates, and saves a checkpoint when asked to."""

    victim: str = "driver's output"
    mechanism: str = "pipe closed"
    state: str = "training"
    runs: Mapping[str, int] = field(default_factory=lambda: ON_REQUEST)

    async def inject(self, scene: Scene, fault: Fault) -> None:
        """Put a pipe that nobody reads in the place of the output; send SIGTERM some updates later."""
        step = scene.coordinator.state.step
        scene.injected(fault, pid=os.getpid(), state="training")
        break_output()
        while scene.coordinator.state.step < step + UPDATES:
            await asyncio.sleep(POLL_S)
        try:
            os.write(1, b"\n")
        except BrokenPipeError:
            scene.injections.add("confirmed", fault=fault.number, state="nobody reads the output", seconds=0.0)
        os.kill(os.getpid(), signal.SIGTERM)

    def expected_code(self, fault: Fault, code: int, log: str) -> int | None:
        """That of a run that was asked to stop."""
        return RunInterrupted.exit_code

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """The output must have been lost, and the run have stopped as asked."""
        if evidence.logged("confirmed", fault) is None:
            return judged(evidence, fault, injection, "the output was not lost, or no update was made without it")
        return super().outcome(evidence, fault, injection)


KINDS = (
    OutputLost(name="output_lost", words="nobody reads the driver's output any more; SIGTERM later; --resume"),
)
"""Kinds of this module."""
