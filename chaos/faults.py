"""One planned fault, as the supervisor hands it to a driver."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass
from typing import Any, Self

KILL, STOP, TERM, HUP = map(int, (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP))


@dataclass(frozen=True)
class Fault:
    """One fault to inject."""

    number: int
    """Unique in its run, from 1."""
    kind: str
    """Name of its kind (`chaos.kinds.KINDS`)."""
    step: int
    """The fault is due after this many updates."""
    rank: int = 0
    sightings: int = 1
    """The fault is injected into the n-th call in the state that the kind requires."""
    delay_s: float = 0.0
    """Seconds from the moment that call is seen; the victim must still be in the same call."""
    position: float = 0.0
    """A fraction for kinds that choose a place: which file and which byte of a checkpoint are damaged."""
    valid_checkpoints: int = 0
    """Number of valid checkpoints required first: damage follows, and another one must be left to resume from."""
    during_repair: bool = False
    """Whether it is injected while the victim of the fault before it is being replaced."""

    def as_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        return cls(**data)
