"""A chunk: samples that travel together from their admission to their committed experience."""

from dataclasses import dataclass
from enum import StrEnum

from rlhf_ray.records import SampleKey
from rlhf_ray.replay.buffer_records import Reservation


class Phase(StrEnum):
    """What is being done with a chunk."""

    ADMITTED = "admitted"
    """Nothing yet, or nothing until other prompts take the places of those that left."""
    GENERATE = "generated"
    SCORE = "scored"
    """By the reference model and the rewards."""
    ASSEMBLE = "read by the learners"
    """Scored by the learners and assembled to experience."""


@dataclass
class Chunk:
    """One chunk under way. It is in `RunState.chunks` from its admission until its experience is in the buffer."""

    place: Reservation
    keys: list[SampleKey]
    """Its samples; fewer than its place has while prompts that left it are not replaced yet."""
    phase: Phase = Phase.ADMITTED
    since: float = 0.0
    """Start of the phase, in seconds of the step clock."""

    @property
    def order(self) -> int:
        """Its admission number."""
        return self.place.order

    @property
    def complete(self) -> bool:
        """Whether it has a sample for each of its places."""
        return len(self.keys) == self.place.samples
