"""The places of the replay buffer: what is reserved, ready and leased, and what a checkpoint keeps of it.

Bookkeeping only. When an entry may move from one state to the next is decided in `buffer`. Sums are kept up to date by
the methods that change them: they are asked for at every chunk, and thousands may be under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_ray.errors import BufferError
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.entries import Entry, Lease, Reservation


class Places:
    """Reservations and ready entries by admission number, leases by their own number, and every key that is held."""

    def __init__(self, capacity_samples: int):
        self.capacity_samples = capacity_samples
        self.reserved: dict[int, Reservation] = {}
        self.ready: dict[int, Entry] = {}
        self.leases: dict[int, Lease] = {}
        self.held: set[SampleKey] = set()
        """Keys of the ready and leased entries."""
        self.trained = 0
        """Samples acknowledged so far."""
        self.running = 0
        """Samples reserved and not yet committed."""
        self.samples_ready = 0
        """Samples of the ready entries."""
        self.bytes = 0
        """Bytes of the ready and leased entries."""
        self._next_order = 0

    def open(self, samples: int, version: int) -> Reservation | None:
        """The next place, admitted at `version`, or None when `samples` more would exceed the capacity."""
        if self.running + len(self.held) + samples > self.capacity_samples:
            return None
        reservation = Reservation(self._next_order, samples, version)
        self._next_order += 1
        self.reserve(reservation)
        return reservation

    def reserve(self, reservation: Reservation) -> None:
        """Keep a place for samples under way."""
        self.reserved[reservation.order] = reservation
        self.running += reservation.samples

    def close(self, reservation: Reservation) -> None:
        """The samples of a place are not under way any more."""
        del self.reserved[reservation.order]
        self.running -= reservation.samples

    def hold(self, entry: Entry) -> None:
        """Make a checked entry ready."""
        self._make_ready(entry)
        self.held.update(entry.keys)
        self.bytes += entry.nbytes

    def drop(self, entry: Entry) -> None:
        """Forget a ready entry."""
        self._lend(entry)
        self.held.difference_update(entry.keys)
        self.bytes -= entry.nbytes

    def lend(self, lease: Lease) -> None:
        """The lease's entries are ready no more, but still held."""
        for entry in lease.entries:
            self._lend(entry)
        self.leases[lease.number] = lease

    def take_back(self, lease: Lease) -> None:
        """The lease's entries are ready again."""
        del self.leases[lease.number]
        for entry in lease.entries:
            self._make_ready(entry)

    def train(self, lease: Lease) -> None:
        """The lease's samples are trained, and gone."""
        del self.leases[lease.number]
        self.held.difference_update(lease.keys)
        self.bytes -= sum(entry.nbytes for entry in lease.entries)
        self.trained += lease.samples

    def check(self, entry: Entry) -> None:
        """Raise BufferError unless the entry's numbers make sense and all its keys are new here."""
        if entry.min_version < 0 or entry.nbytes < 0:
            raise BufferError(
                f"place {entry.order}: min_version={entry.min_version} and nbytes={entry.nbytes} must not be negative "
                "(a negative version means that no response token carries one)"
            )
        repeated = [key for key, times in Counter(entry.keys).items() if times > 1 or key in self.held]
        if repeated:
            raise BufferError(f"place {entry.order}: duplicate samples {repeated[:3]} ({len(repeated)} in all)")

    def ready_entries(self) -> list[Entry]:
        """Ready entries in admission order."""
        return [self.ready[order] for order in sorted(self.ready)]

    def restore(self, entries: Iterable[Entry]) -> None:
        """Take saved entries back to their places. Raises BufferError when a place or a key is taken."""
        for entry in entries:
            self._check_free(entry.order)
            self.check(entry)
            self.hold(entry)
            self._next_order = max(self._next_order, entry.order + 1)

    def state_dict(self) -> dict[str, Any]:
        """Everything but references, as plain JSON types. Raises BufferError while a lease is out."""
        if self.leases:
            raise BufferError(f"cannot save with leases {sorted(self.leases)} out; acknowledge or release them first")
        return {
            "trained": self.trained,
            "next_order": self._next_order,
            "reserved": [[r.order, r.samples] for _, r in sorted(self.reserved.items())],
            "ready": [_entry_state(entry) for entry in self.ready_entries()],
        }

    def load_state_dict(self, state: Mapping[str, Any], refs: Mapping[int, Any], version: int) -> list[Reservation]:
        """Fill empty places from `state_dict`, with a reference per ready entry; returns the open reservations, whose
        samples are made anew, by weights of `version`."""
        if self.reserved or self.held:
            raise BufferError("load_state_dict needs an empty buffer; make a new one")
        missing = [saved["order"] for saved in state["ready"] if saved["order"] not in refs]
        if missing:
            raise BufferError(f"load_state_dict: no reference given for places {missing}")
        self.restore(_entry(saved, refs[saved["order"]]) for saved in state["ready"])
        for order, samples in state["reserved"]:
            self._check_free(order)
            self.reserve(Reservation(order, samples, version))
        self.trained, self._next_order = state["trained"], state["next_order"]
        return [self.reserved[order] for order in sorted(self.reserved)]

    def _make_ready(self, entry: Entry) -> None:
        self.ready[entry.order] = entry
        self.samples_ready += entry.samples

    def _lend(self, entry: Entry) -> None:
        del self.ready[entry.order]
        self.samples_ready -= entry.samples

    def _check_free(self, order: int) -> None:
        if order in self.ready or order in self.reserved:
            raise BufferError(f"restore: place {order} is taken already")


def _entry_state(entry: Entry) -> dict[str, Any]:
    keys = [list(key.numbers) for key in entry.keys]
    return {"order": entry.order, "keys": keys, "min_version": entry.min_version, "nbytes": entry.nbytes}


def _entry(state: Mapping[str, Any], ref: Any) -> Entry:
    keys = tuple(SampleKey(*key) for key in state["keys"])
    return Entry(state["order"], ref, keys, state["min_version"], state["nbytes"])
