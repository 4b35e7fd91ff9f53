"""Damaged weights on their way to the generators."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from chaos.driver_under_test import DriverUnderTest
from chaos.evidence import EARLY_S, Evidence, Outcome
from chaos.faults import Fault
from chaos.kind import judged
from chaos.kinds.drivers import DriverEnd
from chaos.kinds.failures import FailureOnOrder
from rlhf_ray.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class WeightsNaN(DriverEnd):
    """A weight of the policy is NaN when it is published: no generator takes it, and the run ends."""

    victim: str = "policy's weights"
    mechanism: str = "NaN"
    state: str = "publication"

    exit_code: ClassVar[int] = TrainingError.exit_code
    without_effect: ClassVar[str] = "nothing was published"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Order the first rank's next published weights to contain NaN."""
        from chaos.weight_damage import NAN, order_damage

        driver.injected(fault, pid=os.getpid(), state="about to be published")
        order_damage(driver.injections, fault.number, NAN)

    def problem_with_output(self, log: str) -> str:
        """The driver must say what is wrong."""
        return "" if "not finite" in log else "the driver does not report weights that are not finite"


@dataclass(frozen=True, kw_only=True)
class BucketFlip(FailureOnOrder):
    """A bit of a bucket of weights is flipped on its way."""

    victim: str = "policy's weights"
    mechanism: str = "bit flipped"
    state: str = "publication"

    colour: ClassVar[str] = "numbers"
    what: ClassVar[str] = "bucket"
    good: ClassVar[str] = "bucket was taken"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Order a bit of the next bucket to be flipped."""
        from chaos.weight_damage import FLIP, damage_order_file, order_damage

        driver.injected(fault, in_state=True, state="about to be published")
        order_damage(driver.injections, fault.number, FLIP)
        await self.carried_out(damage_order_file(driver.injections))

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """A generator must have refused it, and got it again intact."""
        again = evidence.logged("recovered", fault)
        until = again["time"] + EARLY_S if again else 0.0
        refused = [event for event in evidence.events if event["kind"] == "damaged"
                   and injection["time"] - EARLY_S <= event["lost_at"] <= until]
        for event in refused:
            evidence.events.remove(event)
        if again and not any(event["recovery_s"] is not None for event in refused):
            return judged(evidence, fault, injection, "no generator refused it and got it again")
        return super().outcome(evidence, fault, injection)


KINDS = (
    BucketFlip(name="bucket_flip", words="a bit of a bucket of weights is flipped on its way to the generators"),
    WeightsNaN(name="weights_nan", words="a weight of the policy is NaN when it is published; --resume"),
)
"""Kinds of this module."""
