"""What the replay buffer hands out and takes back: reservations, entries, leases, evictions, statistics."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlhf_ray.records import SampleKey


@dataclass(frozen=True)
class Reservation:
    """A place in the buffer for samples under way. A retry of the same samples keeps it."""

    order: int
    """Admission number: unique in a run, and the order in which batches are formed."""
    samples: int
    version: int
    """The policy's version at admission: no token of the samples comes from an older one."""


@dataclass(frozen=True)
class Entry:
    """A committed chunk of experience. It is leased, trained and dropped whole."""

    order: int
    ref: Any
    """Opaque reference to the experience (an object reference of the store); never the bytes."""
    keys: tuple[SampleKey, ...]
    """The samples of the chunk, one key each."""
    min_version: int
    """Oldest weight version among its response tokens."""
    nbytes: int

    @property
    def samples(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Lease:
    """Entries lent to one update. Must be acknowledged or released before `deadline`, or it comes back by itself."""

    number: int
    entries: tuple[Entry, ...]
    """In admission order."""
    version: int
    """The policy's version for which the entries were found fresh."""
    deadline: float
    """In seconds of the buffer's clock."""

    @property
    def refs(self) -> list[Any]:
        """References, in admission order."""
        return [entry.ref for entry in self.entries]

    @property
    def keys(self) -> list[SampleKey]:
        """Keys of all samples, in admission order."""
        return [key for entry in self.entries for key in entry.keys]

    @property
    def samples(self) -> int:
        return sum(entry.samples for entry in self.entries)


class CommitOutcome(StrEnum):
    """What became of a commit."""

    READY = "ready"
    """Held, waiting to be leased."""
    STALE = "stale"
    """Refused: older than the bound allows. The reservation is closed; the samples must be generated again."""
    AHEAD = "ahead"
    """Refused: made by a version newer than the policy, which was rebuilt from an earlier checkpoint meanwhile."""


@dataclass(frozen=True)
class Eviction:
    """An entry that was dropped without being trained. Its keys belong in the ledger, its prompts back in the queue."""

    entry: Entry
    staleness: int
    """Versions behind the policy when it was dropped; negative when ahead of it."""


@dataclass(frozen=True)
class BufferStats:
    """The buffer at one moment."""

    samples_ready: int
    samples_reserved: int
    samples_leased: int
    bytes: int
    """Bytes of the ready and leased entries."""
