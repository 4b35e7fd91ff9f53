"""A user's reward function that blocks, forks or floods its output, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from chaos import reward_function
from chaos.driver_under_test import DriverUnderTest
from chaos.faults import Fault
from chaos.kinds.failures import FailureOnOrder


@dataclass(frozen=True, kw_only=True)
class FunctionFailure(FailureOnOrder):
    """The function fails in one call, and its process is killed, or ignored."""

    failure: str
    victim: str = "reward function"
    state: str = "a call"

    colour: ClassVar[str] = "service"
    what: ClassVar[str] = "call"
    good: ClassVar[str] = "call succeeded"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Order the function to fail in the next call."""
        driver.injected(fault, in_state=True, state="called for a chunk")
        reward_function.order_failure(driver.injections.path, fault.number, self.failure)
        await self.carried_out(reward_function.order_file(driver.injections.path))


KINDS = (
    FunctionFailure(name="function_hang", words="a user's reward function blocks in a call, deaf to signals",
                    mechanism="blocks", failure=reward_function.HANG),
    FunctionFailure(name="function_fork", words="a user's reward function forks, and exits without an answer",
                    mechanism="forks", failure=reward_function.FORK),
    FunctionFailure(name="function_flood", words="a user's reward function writes 32 MiB to its output",
                    mechanism="floods its output", failure=reward_function.FLOOD),
)
"""Kinds of this module."""
