"""A chunk: samples that travel together, from their admission to the update that trains on them; and what is made of
chunks: leases, the outcome of a commit, counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rlhf_ray.records import SampleKey, Sifted


class Place(NamedTuple):
    """A chunk's place in the order of admission, in which batches are formed. No two chunks in the buffer have the
    same."""

    order: int
    """Admission number. Another attempt at the same chunk keeps it; samples that are admitted again get a new one."""
    part: tuple[int, ...] = ()
    """Empty, until the chunk is split: (1,) is what was split from it first, (1, 2) what was split from that second. A
    part comes right behind what it was split from, whichever of several parts is split first."""

    def __str__(self) -> str:
        return ".".join(map(str, (self.order, *self.part)))

    def plain(self) -> int | str:
        """For JSON: the admission number, or as text "order.part"."""
        return str(self) if self.part else self.order

    @classmethod
    def from_plain(cls, plain: int | str) -> Place:
        """The place that `plain` gave."""
        order, *part = map(int, str(plain).split("."))
        return cls(order, tuple(part))


class Phase(StrEnum):
    """What is being done with a chunk. The values complete "is being ..." in `rlhf-ray status`."""

    ADMITTED = "admitted"
    """Nothing yet, or nothing until other prompts take the places of those that left."""
    GENERATE = "generated"
    SCORE = "scored"
    """By the reference model and the rewards."""
    ASSEMBLE = "read by the learners"
    """Scored by the learners and assembled to experience."""
    READY = "ready"
    """Its experience waits for an update, or is being trained on."""


@dataclass(eq=False)
class Chunk:
    """One chunk. The buffer makes it and knows its phase; the pipeline fills it.

    Columns are references to results of the roles, which lie in the object store: never the bytes themselves. Columns
    that a scoring batch has in common are in `coordinator.chunk_calls.Columns`.
    """

    place: Place
    samples: int
    """How many samples it has room for."""
    version: int
    """While it is reserved: the policy's version at admission. No token of the samples comes from an older one."""
    keys: list[SampleKey] = field(default_factory=list)
    """Its samples; fewer than `samples` while prompts that left it are not replaced yet."""
    phase: Phase = Phase.ADMITTED
    since: float = 0.0
    """Start of the phase, in seconds of the step clock."""
    prompts: Any = None
    """Reference to its prompts, perhaps among others; None before they are read."""
    rollout: Any = None
    """Reference to its rollout; None before it is generated and after its experience is assembled."""
    generator: str = ""
    """Name of the worker that generated the rollout."""
    experience: Any = None
    """Reference to its experience; None before it is assembled."""
    min_version: int = -1
    """Oldest weight version among its response tokens, once its experience is assembled."""
    nbytes: int = 0
    """Size of the experience."""
    summary: Any = None
    """The small numbers about its experience (`records.ExperienceSummary`). A checkpoint saves them."""
    draws: int = 1
    """How often prompts have been drawn for its place, with dynamic sampling; its own are the latest."""
    filtered: dict[str, list[float]] = field(default_factory=dict)
    """Scores of the samples that were drawn for its place before and filtered, by the names in `Sifted`."""
    sifted: Sifted | None = None
    """Which of its samples to keep; None for all."""

    @classmethod
    def outside(cls, keys: list[SampleKey]) -> Chunk:
        """A chunk without a place in a buffer, as of an evaluation."""
        return cls(Place(-1), len(keys), version=0, keys=keys)

    @property
    def complete(self) -> bool:
        """Whether it has as many samples as it has room for."""
        return len(self.keys) == self.samples

    def fill(self, experience: Any, min_version: int, nbytes: int, summary: Any = None) -> None:
        """Give it the experience of its samples, in place of what that was made from."""
        self.prompts = self.rollout = None
        self.generator = ""
        self.experience = experience
        self.min_version = min_version
        self.nbytes = nbytes
        self.summary = summary

    def forget(self) -> None:
        """Drop what was made of its samples."""
        self.prompts = self.rollout = self.experience = self.summary = self.sifted = None
        self.generator = ""


@dataclass(frozen=True)
class Lease:
    """Chunks lent to one update, until it is acknowledged."""

    number: int
    chunks: tuple[Chunk, ...]
    """In the order of admission."""
    version: int
    """The policy's version for which their experience was found fresh."""

    @property
    def experiences(self) -> list[Any]:
        """References, in the order of admission."""
        return [chunk.experience for chunk in self.chunks]

    @property
    def keys(self) -> list[SampleKey]:
        """Keys of all samples, in the order of admission."""
        return [key for chunk in self.chunks for key in chunk.keys]

    @property
    def samples(self) -> int:
        return sum(chunk.samples for chunk in self.chunks)


class CommitOutcome(StrEnum):
    """The result of a commit."""

    READY = "ready"
    """Held, waiting to be leased."""
    STALE = "stale"
    """Refused: older than the bound allows. The place is closed; the samples must be generated again."""
    AHEAD = "ahead"
    """Refused: generated by a version newer than the policy, which has been restored from an earlier checkpoint."""


@dataclass(frozen=True)
class BufferStats:
    """The buffer at one moment."""

    samples_ready: int
    samples_reserved: int
    samples_leased: int
    bytes: int
    """Bytes of the ready and leased experience."""
