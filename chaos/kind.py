"""A kind of fault: what is hit, how, in which state, and how each of these is done and checked.

A family of kinds is a subclass of `Kind` in `chaos/kinds/`, and a kind one instance of it in that module's KINDS. To
add a kind, add an instance (or a family, and its module to `chaos/kinds/__init__.py`) and a row to docs/chaos.md: plan,
injector, supervisor, outcomes, summary and page call the methods below and know no kind by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chaos.driver_under_test import DriverUnderTest
from chaos.evidence import Evidence, Outcome
from chaos.faults import Fault
from chaos.requirements import Requirement, first_missing
from chaos.run_record import RunRecord, Start

DEFAULT_MOST_SIGHTINGS = 4


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault. Kinds with the same victim, mechanism and state count as one (`triple`)."""

    name: str
    words: str
    """Description for tables."""
    victim: str
    """What is hit: a role, "driver", "reward service", "checkpoint", ..."""
    mechanism: str
    """How: "SIGKILL", "bit flipped", ..."""
    state: str
    """In which state of the victim: "update", "while it waits for workers", ..."""
    runs: Mapping[str, int] = field(default_factory=lambda: {"synchronous": 1})
    """How often it is in each run of a round (`campaign.RUNS`). Alone (--only) it is in the first of them."""
    requires: tuple[Requirement, ...] = ()
    """What the machine must have."""
    role: str = ""
    """The victim's role, if it is a worker: the fault hits a random rank, and training waits while that one is
    down."""
    most_sightings: int = DEFAULT_MOST_SIGHTINGS
    """The fault is injected into one of so many calls in the required state."""
    most_delay_s: float = 0.0
    """Longest delay within that call, or before the fault."""
    updates: int = 0
    """Number of updates that are made during the fault, of a fault that lasts."""
    preceded_by: str = ""
    """Name of the kind whose fault leads to the required state: the plan puts one immediately before."""
    moment: str = ""
    """A time outside the training loop at which it is injected (`DriverUnderTest.moment`)."""
    changes_results: bool = False
    """Whether a run that survives it ends with other weights."""

    colour: ClassVar[str] = "worker"
    """Group in the picture (`page.COLOURS`)."""
    ends_the_driver: ClassVar[bool] = False
    """Whether the run must be resumed afterwards."""
    follows_an_end: ClassVar[bool] = False
    """Whether it is injected while no driver runs, or into a driver that is about to start."""
    needs_no_driver: ClassVar[bool] = False
    """Whether it is injected while no driver runs (`inject_between`); others that follow an end are injected by the
    environment of the next driver."""
    is_repaired: ClassVar[bool] = False
    """Whether its victim is replaced while the run goes on: another fault may be injected meanwhile."""
    own_disk: ClassVar[bool] = False
    """Whether the run's directory must be a file system of its own."""
    at_the_end: ClassVar[bool] = False
    """Whether it hits what a run does after its last update."""
    checkpoints: ClassVar[int] = 0
    """Number of valid checkpoints that must exist before it."""
    may_not_happen: ClassVar[bool] = False
    """Whether a fault that was not injected is no error, because chance decides."""
    exact_event: ClassVar[bool] = False
    """Whether its line of faults.jsonl is known exactly, and taken before other faults look for theirs."""

    @property
    def triple(self) -> tuple[str, str, str]:
        """What distinguishes kinds."""
        return self.victim, self.mechanism, self.state

    def not_possible(self) -> str | None:
        """Why it cannot be tried on this machine; None if it can."""
        return first_missing(self.requires)

    def environment(self, fault: Fault) -> dict[str, str]:
        """Environment variables of the driver that gets the fault."""
        return {}

    def driver_starts(self, record: RunRecord, fault: Fault) -> None:
        """Called before the driver that gets this fault starts."""

    def expected_code(self, fault: Fault, code: int, log: str) -> int | None:
        """The exit code that this fault causes; None if it ends no driver.

        Args:
            code: the driver's exit code.
            log: everything that the driver printed.
        """
        return None

    async def inject(self, driver: DriverUnderTest, fault: Fault) -> None:
        """Wait for the required state, call `driver.injected`, and act."""
        raise NotImplementedError(f"{self.name} is not injected from inside the driver")

    def inject_between(self, record: RunRecord, fault: Fault) -> str | None:
        """For kinds that need no driver: act while none runs.

        Returns:
            What was done; None if it could not be done.
        """
        return None

    def driver_ended(self, record: RunRecord, start: Start, fault: Fault) -> None:
        """Called when a driver that got this fault has ended, before the next one starts."""

    def went_unnoticed(self, evidence: Evidence, injection: dict[str, Any]) -> bool:
        """Whether the driver ended before it could notice its victim's loss, which therefore proves nothing. Then
        the fault is injected again. `injection` is its last line "injected" of the injection log."""
        return False

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """Whether the run survived it. `injection` is its line "injected" of the injection log."""
        raise NotImplementedError


def judged(evidence: Evidence, fault: Fault, injection: dict[str, Any], problem: str = "",
           detection_s: float | None = None, recovery_s: float | None = None) -> Outcome:
    """The outcome of a fault that was injected."""
    return Outcome(evidence.record.config.stem, fault, injection["state"], detection_s, recovery_s, problem,
                   repairing=tuple(injection.get("repairing", ())))
