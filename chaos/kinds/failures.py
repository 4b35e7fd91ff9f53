"""Failures on order: a reward service that answers wrongly once, and losses and gradients that are NaN once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from chaos.driver_under_test import POLL_S, DriverUnderTest
from chaos.evidence import Evidence, Outcome
from chaos.faults import Fault
from chaos.invariants import is_held_out, was_quarantined
from chaos.kind import Kind, judged

LEFT_OUT = "left out: a loss or gradient was not finite"
NOT_MEASURED = "is left out of the evaluation: a response to it has no score"


@dataclass(frozen=True, kw_only=True)
class FailureOnOrder(Kind):
    """Something fails once, because a file with an order says so. It is over when it has succeeded again."""

    what: ClassVar[str]
    good: ClassVar[str]
    """What fails, and what shows that it is over, in words."""

    async def carried_out(self, order: Path) -> None:
        """Wait until the order has been obeyed: the next fault may be an order, too."""
        while order.exists():
            await asyncio.sleep(POLL_S)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """It must have failed, and succeeded afterwards."""
        failed, recovered = (evidence.logged(event, fault) for event in ("confirmed", "recovered"))
        if failed is None or recovered is None:
            problem = f"it hit no {self.what}" if failed is None else f"no {self.good} afterwards"
            return judged(evidence, fault, injection, problem)
        return judged(evidence, fault, injection, self.problem_with_results(evidence, failed),
                      recovery_s=recovered["time"] - failed["time"])

    def problem_with_results(self, evidence: Evidence, failed: dict[str, Any]) -> str:
        """For a failure that changes the results: why it did not do so as documented."""
        return ""

    def steps_left_out(self, evidence: Evidence, failed: dict[str, Any]) -> str:
        """Empty if the run logs that optimizer steps were skipped: in that update, where it is known."""
        begins = f"step {failed['step']}: " if "step" in failed else "step "
        left_out = any(begins in line and LEFT_OUT in line for line in evidence.logs())
        return "" if left_out else "no optimizer step was left out"


@dataclass(frozen=True, kw_only=True)
class ServiceFailure(FailureOnOrder):
    """The reward service fails at one request. Statuses and bad contents are answers that the service gives in place of
    scores, and count as one kind; an answer that is late, and one that is cut off, fail in other places."""

    behaviour: str
    """As the service names it."""

    colour: ClassVar[str] = "service"
    what: ClassVar[str] = "request"
    good: ClassVar[str] = "request succeeded"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Order the service to fail at the next request."""
        from chaos.reward_service import failure_order_file, order_failure

        driver.injected(fault, in_state=True, state="a request for scores was received")
        order_failure(driver.injections, fault.number, self.behaviour)
        await self.carried_out(failure_order_file(driver.injections))


@dataclass(frozen=True, kw_only=True)
class Refusal(ServiceFailure):
    """The service gives no score to a prompt from now on."""

    def problem_with_results(self, evidence: Evidence, failed: dict[str, Any]) -> str:
        """The prompt must be quarantined, or left out of the evaluation that it belongs to."""
        if was_quarantined(evidence.record, failed["prompt"]):
            return ""
        if is_held_out(evidence.record, failed["prompt"]):
            return "" if any(NOT_MEASURED in line for line in evidence.logs()) else "no held-out prompt was left out"
        return f"prompt {failed['prompt']!r} was not quarantined"


@dataclass(frozen=True, kw_only=True)
class TooLarge(ServiceFailure):
    """Its scores are finite, but so large that losses are not."""

    def problem_with_results(self, evidence: Evidence, failed: dict[str, Any]) -> str:
        """Optimizer steps must be skipped."""
        return self.steps_left_out(evidence, failed)


@dataclass(frozen=True, kw_only=True)
class NotANumber(FailureOnOrder):
    """A loss, or a gradient, of one rank is NaN."""

    where: str
    """"loss" or "gradient"."""

    colour: ClassVar[str] = "numbers"
    what: ClassVar[str] = "loss"
    good: ClassVar[str] = "optimizer step was applied"

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Order a loss or gradient of the next update to be NaN."""
        from chaos.nan_injection import nan_order_file, order_nan

        driver.injected(fault, role=self.role, rank=fault.rank, in_state=True,
                       state=f"a {self.where} of the next update")
        order_nan(driver.injections, fault.number, self.role, fault.rank, self.where)
        await self.carried_out(nan_order_file(driver.injections))

    def problem_with_results(self, evidence: Evidence, failed: dict[str, Any]) -> str:
        """That optimizer step must be skipped. If a learner or the driver was lost in the same update, it is made again
        from a checkpoint, without the NaN."""
        loop = evidence.next_loop(failed["time"])
        made_again = loop is not None and not any(line["fault"] == failed["fault"] and line["time"] < loop
                                                  for line in evidence.record.injections.read("recovered"))
        return "" if made_again else self.steps_left_out(evidence, failed)


def _served(behaviour: str, words: str, mechanism: str = "answers without valid scores",
            family: type[ServiceFailure] = ServiceFailure, **more: Any) -> ServiceFailure:
    return family(name=f"http_{behaviour}", words=f"the reward service {words}", victim="reward service",
                  mechanism=mechanism, state="a request for scores", behaviour=behaviour, **more)


CHANGED: dict[str, Any] = {"runs": {"overlapped": 1}, "changes_results": True}
KINDS = (
    NotANumber(name="loss_nan", words="a loss of one rank of the policy is NaN", victim="policy_learner",
               mechanism="NaN", state="loss", where="loss", role="policy_learner", **CHANGED),
    NotANumber(name="gradient_nan", words="a gradient of one rank of the critic is NaN", victim="critic_learner",
               mechanism="NaN", state="gradient", where="gradient", role="critic_learner",
               **CHANGED),
    _served("500", "answers 500"), _served("429", "answers 429, with Retry-After"),
    _served("slow", "takes longer than a request may", "answers late"),
    _served("trickle", "sends a byte now and then", "answers slowly"),
    _served("truncated", "ends in the middle of a response", "connection ends"),
    _served("reset", "resets the connection", "connection ends"),
    _served("nan", "scores NaN"), _served("too_few", "gives too few scores"),
    _served("largest", "gives scores so large that a loss is not finite", family=TooLarge, **CHANGED),
    _served("400", "refuses a prompt from now on: its samples leave the run by name", family=Refusal, **CHANGED),
)
"""Kinds of this module."""
