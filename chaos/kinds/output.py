"""The reader of the driver's output ends."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import ClassVar

from chaos.driver_under_test import POLL_S, DriverUnderTest
from chaos.faults import Fault
from chaos.kinds.drivers import DriverEnd
from chaos.lost_output import break_output
from rlhf_ray.errors import RunInterrupted


@dataclass(frozen=True, kw_only=True)
class OutputLost(DriverEnd):
    """Nobody reads the driver's output any more; it goes on for some updates, and saves a checkpoint when asked to."""

    victim: str = "driver's output"
    mechanism: str = "pipe closed"
    state: str = "training"
    updates: int = 3

    exit_code: ClassVar[int] = RunInterrupted.exit_code
    without_effect: ClassVar[str] = "the output was not lost, or no update was made without it"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Put a pipe that nobody reads in the place of the output; send SIGTERM some updates later."""
        step = driver.coordinator.state.step
        driver.injected(fault, pid=os.getpid(), state="training")
        break_output()
        while driver.coordinator.state.step < step + self.updates:
            await asyncio.sleep(POLL_S)
        try:
            os.write(1, b"\n")
        except BrokenPipeError:
            driver.injections.add("confirmed", fault=fault.number, state="nobody reads the output", seconds=0.0)
        os.kill(os.getpid(), signal.SIGTERM)


KINDS = (
    OutputLost(name="output_lost", words="nobody reads the driver's output any more; SIGTERM later; --resume"),
)
"""Kinds of this module."""
