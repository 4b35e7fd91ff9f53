"""The replay buffer: object references of experience, in order of admission, reserved, ready or leased."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_ray.errors import BufferError
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.buffer_records import BufferStats, CommitOutcome, Entry, Lease, Reservation
from rlhf_ray.replay.staleness import in_time, is_fresh


class ReplayBuffer:
    """Experience between generation and learning. Not thread-safe: for the coordinator's event loop only.

    The life of an entry:

        reserve ──► commit ──► ready ──► lease ──► ack      trained, gone
                      └► stale   └► evict                   dropped, keys returned

    *Reserve* takes a place before generation starts, so a full buffer stops new work and never finished work. The
    place has an admission number, and batches are formed in the order of these numbers. A straggler is passed over as
    long as it, and everything that is left, can still be trained within the bound (`staleness.in_time`); then a lease
    waits for it. So nothing that was admitted in time grows too old, and at max_staleness 0 a batch is exactly the
    oldest admitted samples, bit for bit the same whatever finished first.
    *Commit* puts a reference into the place. Experience that is too stale is refused, which closes the place.
    *Lease* lends exactly as many samples as an update needs, all of them fresh at the given version. *Ack* marks them
    as trained. An update that fails ends the loop: its samples are those of the checkpoint that it goes on from.
    *Evict* drops ready entries that may no longer be trained at the given version, and returns them.

    Call `evict` whenever the policy's version changes, before generators receive it: a commit is compared with the
    version of the last such call, and refused when its version is ahead of that.
    The buffer knows the samples it holds; the ledger guarantees that none is trained twice in a run.
    """

    def __init__(self, capacity_samples: int, capacity_bytes: int | None, max_staleness: int) -> None:
        self.capacity_samples = capacity_samples
        self.capacity_bytes = capacity_bytes
        self.max_staleness = max_staleness
        # Sums are updated by the methods that change them: they are read for every chunk, of which there may be
        # thousands.
        self.running = 0
        """Samples reserved and not yet committed."""
        self.bytes = 0
        """Bytes of the ready and leased entries."""
        self._reserved: dict[int, Reservation] = {}
        self._ready: dict[int, Entry] = {}
        self._leases: dict[int, Lease] = {}
        self._held: set[SampleKey] = set()
        """Keys of the ready and leased entries."""
        self._samples_ready = 0
        self._trained = 0
        """Samples acknowledged so far."""
        self._version = self._next_order = self._next_lease = 0

    @property
    def accepted(self) -> int:
        """Samples ever committed and not dropped: trained, leased and ready. What `AdmissionRule` counts."""
        return self._trained + len(self._held)

    def reserve(self, samples: int, version: int, again: bool = False) -> Reservation | None:
        """A place for `samples` samples, or None while the buffer has no room for them.

        Args:
            version: of the weights that the generators hold; no token will be sampled with an older one.
            again: they had a place before; the capacity in bytes is ignored then, so that admitted samples are
                finished.
        """
        if self.running + len(self._held) + samples > self.capacity_samples or (self._bytes_full() and not again):
            return None
        reservation = Reservation(self._next_order, samples, version)
        self._next_order += 1
        self._open(reservation)
        return reservation

    def commit(
        self, reservation: Reservation, ref: Any, keys: Iterable[SampleKey], min_version: int, nbytes: int,
        summary: Any = None,
    ) -> CommitOutcome:
        """Fill a place with a reference to finished experience.

        Args:
            ref: opaque reference to the experience.
            keys: its samples, as many as were reserved.
            min_version: oldest weight version among its response tokens.
            nbytes: its size. A commit may exceed the capacity in bytes; no new place is reserved then.
            summary: what the entry carries for its reader; opaque.

        Returns:
            READY when held; STALE or AHEAD when refused, which closes the reservation.

        Raises:
            BufferError: the reservation is not open (a second commit), the number of keys differs from it, a key is
                held already or named twice, or a number is negative. The buffer is unchanged then.
        """
        self._check_open(reservation)
        entry = Entry(reservation.order, ref, tuple(keys), min_version, nbytes, summary)
        if entry.samples != reservation.samples:
            raise BufferError(
                f"commit of place {entry.order}: {entry.samples} keys for a reservation of {reservation.samples}"
            )
        self._check_new(entry)
        self._close(reservation)
        if not self._fresh(entry):
            return CommitOutcome.AHEAD if entry.min_version > self._version else CommitOutcome.STALE
        self._hold(entry)
        return CommitOutcome.READY

    def lease(self, samples: int, version: int) -> Lease | None:
        """Lend exactly `samples` fresh samples for the update of `version`, or None while there are not enough.

        Entries that are not fresh are passed over; `evict` drops them.

        Raises:
            BufferError: whole chunks do not add up to `samples`, or waiting longer could never help.
        """
        self._version = version
        chosen = self._oldest(samples)
        if chosen is None:
            self._check_not_stuck(samples)
            return None
        lease = Lease(self._next_lease, tuple(chosen), version)
        self._next_lease += 1
        for entry in chosen:
            self._take_ready(entry)
        self._leases[lease.number] = lease
        return lease

    def ack(self, lease: Lease, trained_version: int) -> None:
        """Mark a lease as trained, by the update that started from `trained_version`.

        Raises:
            BufferError: the lease is not out (acknowledged before, or of another buffer), or was for another version.
        """
        if self._leases.get(lease.number) is not lease:
            raise BufferError(f"ack of lease {lease.number}: it is not out (acknowledged before, or of another buffer)")
        if trained_version != lease.version:
            raise BufferError(
                f"ack of lease {lease.number}: trained from version {trained_version}, but its samples were found "
                f"fresh for version {lease.version}; name the version that the update started from"
            )
        del self._leases[lease.number]
        self._held.difference_update(lease.keys)
        self.bytes -= sum(entry.nbytes for entry in lease.entries)
        self._trained += lease.samples

    def evict(self, version: int) -> list[Entry]:
        """Drop the ready entries that may no longer be trained now that the policy is at `version`, and return them.
        Their samples must be generated again."""
        self._version = version
        dropped = [entry for entry in self.ready_entries() if not self._fresh(entry)]
        for entry in dropped:
            self._drop(entry)
        return dropped

    def drop(self, entries: Iterable[Entry]) -> None:
        """Drop ready entries whose samples must be generated again."""
        for entry in entries:
            self._drop(entry)

    def trim(self, batch: int) -> list[Entry | Reservation]:
        """Drop what batches of `batch` samples, formed in admission order from the present version on, would not train
        in time, as after a resume with a smaller bound; samples under way count as generated by the present version.

        Returns:
            the dropped places in admission order: ready entries, and reservations, which are closed.
        """
        dropped: list[Entry | Reservation] = []
        kept = 0
        for order in sorted(self._ready.keys() | self._reserved.keys()):
            place = self._ready.get(order) or self._reserved[order]
            made_by = place.min_version if isinstance(place, Entry) else self._version
            if is_fresh(made_by, self._version + (kept + place.samples - 1) // batch, self.max_staleness):
                kept += place.samples
                continue
            dropped.append(place)
            if isinstance(place, Entry):
                self._drop(place)
            else:
                self._close(place)
        return dropped

    def stats(self) -> BufferStats:
        """Counts and bytes now."""
        return BufferStats(samples_ready=self._samples_ready, samples_reserved=self.running,
                           samples_leased=len(self._held) - self._samples_ready, bytes=self.bytes)

    def ready_entries(self) -> list[Entry]:
        """The ready entries in admission order; a checkpoint has to save their bytes."""
        return [self._ready[order] for order in sorted(self._ready)]

    def leases(self) -> list[Lease]:
        """The leases that are out, oldest first."""
        return list(self._leases.values())

    def state_dict(self) -> dict[str, Any]:
        """Everything but the references, as plain JSON types. Save the bytes of `ready_entries` beside it.

        Raises:
            BufferError: a lease is out, so it is unknown whether its samples are trained.
        """
        if self._leases:
            raise BufferError(f"cannot save with leases {sorted(self._leases)} out; acknowledge them first")
        return {
            "version": self._version,
            "trained": self._trained,
            "next_order": self._next_order,
            "reserved": [[r.order, r.samples] for _, r in sorted(self._reserved.items())],
            "ready": [_entry_state(entry) for entry in self.ready_entries()],
        }

    def load_state_dict(self, state: Mapping[str, Any], refs: Mapping[int, Any],
                        summaries: Mapping[int, Any] | None = None) -> list[Reservation]:
        """Resume an empty buffer from `state_dict`, which may exceed a capacity or a bound that are smaller than those
        of the buffer that gave it: call `trim` before anything is leased or reserved.

        Args:
            refs: a reference per ready entry, by its order number.
            summaries: of ready entries, by order number.

        Returns:
            The open reservations: generate their samples again under them.
        """
        for saved in state["ready"]:
            entry = _entry(saved, refs[saved["order"]], (summaries or {}).get(saved["order"]))
            self._check_new(entry)
            self._hold(entry)
        self._version, self._trained, self._next_order = state["version"], state["trained"], state["next_order"]
        for order, samples in state["reserved"]:
            self._open(Reservation(order, samples, self._version))
        return [self._reserved[order] for order in sorted(self._reserved)]

    def _oldest(self, samples: int) -> list[Entry] | None:
        """Fresh entries of lowest order that add up to `samples`; None when there are not enough, or when those they
        pass over would grow too old."""
        if self._samples_ready < samples:
            return None
        chosen: list[Entry] = []
        passed: list[Reservation] = []
        total, orders = 0, iter(sorted(self._ready.keys() | self._reserved.keys()))
        for order in orders:
            if order in self._reserved:
                passed.append(self._reserved[order])
                continue
            entry = self._ready[order]
            if not self._fresh(entry):
                continue
            chosen.append(entry)
            total += entry.samples
            if total >= samples:
                break
        if total < samples:
            return None
        if total > samples:
            if passed:  # chunks of another size, as after a resume with other settings; in order they add up
                return None
            raise BufferError(
                f"cannot lease exactly {samples} samples: chunks of {[e.samples for e in chosen]} in admission "
                f"order give {total}, and chunks are not split; make the samples of a step a multiple of the chunk"
            )
        return chosen if not passed or self._can_wait(passed, orders, samples) else None

    def _can_wait(self, passed: list[Reservation], later: Iterable[int], batch: int) -> bool:
        """Whether the places that a batch passes over, and those after it, can all be trained in time after it."""
        rest = [(place.samples, place.version) for place in passed]
        for order in later:
            entry = self._ready.get(order)
            if entry is None:
                rest.append((self._reserved[order].samples, self._reserved[order].version))
            elif self._fresh(entry):
                rest.append((entry.samples, entry.min_version))
        return in_time(rest, batch, self._version + 1, self.max_staleness)

    def _check_not_stuck(self, samples: int) -> None:
        """Raise when no later commit could ever fill the batch, so that the run does not wait for ever."""
        idle = not self._reserved and not self._leases and all(self._fresh(e) for e in self._ready.values())
        if idle and self._bytes_full():
            raise BufferError(
                f"the buffer is full at {self.bytes} of {self.capacity_bytes} bytes with {len(self._held)} samples, "
                f"fewer than the {samples} of an update; raise buffer.capacity_mb"
            )

    def _open(self, reservation: Reservation) -> None:
        self._reserved[reservation.order] = reservation
        self.running += reservation.samples

    def _close(self, reservation: Reservation) -> None:
        del self._reserved[reservation.order]
        self.running -= reservation.samples

    def _hold(self, entry: Entry) -> None:
        """Make a checked entry ready."""
        self._ready[entry.order] = entry
        self._samples_ready += entry.samples
        self._held.update(entry.keys)
        self.bytes += entry.nbytes

    def _drop(self, entry: Entry) -> None:
        """Remove a ready entry."""
        self._take_ready(entry)
        self._held.difference_update(entry.keys)
        self.bytes -= entry.nbytes

    def _take_ready(self, entry: Entry) -> None:
        del self._ready[entry.order]
        self._samples_ready -= entry.samples

    def _check_open(self, reservation: Reservation) -> None:
        if self._reserved.get(reservation.order) != reservation:
            raise BufferError(
                f"commit of place {reservation.order}: no such open reservation (committed twice, or of another buffer)"
            )

    def _check_new(self, entry: Entry) -> None:
        """Raise BufferError unless the entry's numbers make sense and all its keys are new here."""
        if entry.min_version < 0 or entry.nbytes < 0:
            raise BufferError(
                f"place {entry.order}: min_version={entry.min_version} and nbytes={entry.nbytes} must not be negative "
                "(a negative version means that no response token has one)"
            )
        repeated = [key for key, times in Counter(entry.keys).items() if times > 1 or key in self._held]
        if repeated:
            raise BufferError(f"place {entry.order}: duplicate samples {repeated[:3]} ({len(repeated)} in all)")

    def _fresh(self, entry: Entry) -> bool:
        return is_fresh(entry.min_version, self._version, self.max_staleness)

    def _bytes_full(self) -> bool:
        return self.capacity_bytes is not None and self.bytes >= self.capacity_bytes


def _entry_state(entry: Entry) -> dict[str, Any]:
    keys = [list(key.numbers) for key in entry.keys]
    return {"order": entry.order, "keys": keys, "min_version": entry.min_version, "nbytes": entry.nbytes}


def _entry(state: Mapping[str, Any], ref: Any, summary: Any) -> Entry:
    keys = tuple(SampleKey(*key) for key in state["keys"])
    return Entry(state["order"], ref, keys, state["min_version"], state["nbytes"], summary)
