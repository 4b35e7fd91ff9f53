"""Drivers on other machines, as far as a run's directory shows them, and a clock that does not wait."""

from dataclasses import dataclass, field
from pathlib import Path

from rlhf_ray.observability.owner_record import ProcessIdentity, Term
from rlhf_ray.observability.ownership import claim


def host(name: str) -> ProcessIdentity:
    """A driver on a machine of that name."""
    return ProcessIdentity(name, f"boot of {name}", 1, 4711, 99)


@dataclass
class Watch:
    """A challenger's clock: sleeping takes no time, and lets things happen when their time has come."""

    now: float = 0.0
    events: dict[float, object] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in sorted(when for when in self.events if when <= self.now):
            self.events.pop(when)()

    def claim(self, directory: Path, process: ProcessIdentity) -> Term:
        return claim(directory, process, self.said.append, self.clock, self.sleep)


def take_over(directory: Path, name: str = "b") -> Term:
    """A driver on another machine claims the directory, whose owner gives no sign of life meanwhile."""
    return Watch().claim(directory, host(name))
