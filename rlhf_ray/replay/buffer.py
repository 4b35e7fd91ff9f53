"""The replay buffer: who holds which experience, in which order, for how long. References only, never tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlhf_ray.errors import BufferError
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.entries import (
    BufferStats,
    CommitOutcome,
    Entry,
    Eviction,
    Lease,
    Reservation,
)
from rlhf_ray.replay.freshness import in_time, is_fresh, staleness
from rlhf_ray.replay.places import Places


class ReplayBuffer:
    """Experience between generation and learning, for the coordinator's one thread (no locks).

    The life of an entry:

        reserve ──► commit ──► ready ──► lease ──► ack                trained, gone
                      │          │ ▲       └─► release, expire        comes back, same place
                      │          │ └───────────────┘
                      └► stale   └► evict                             dropped, keys returned

    *Reserve* takes a place before generation starts, so a full buffer stops new work and never finished work. The
    place has an admission number, and batches are formed in the order of these numbers. A straggler is passed over as
    long as it, and all else that is left, can still be trained within the bound (`freshness.in_time`); then a lease
    waits for it. So nothing that was admitted in time grows too old, and at max_staleness 0 a batch is exactly the
    oldest admitted samples, bit for bit the same whatever finished first.
    *Commit* puts a reference into the place. What is too stale for the bound is refused with an outcome and closes it.
    *Lease* lends exactly as many samples as an update needs, every one of them fresh at the version named. *Ack* says
    that they were trained. *Release*, or `expire` after the deadline, brings them back to their old places.
    *Evict* drops ready entries that may no longer be trained at the version named, and returns them.

    Call `evict` whenever the policy's version changes, before generators receive it: a commit is judged by the version
    the buffer was told of last, and refused when it comes from a version ahead of that.
    The buffer knows the samples it holds; that none is trained twice in a run is the ledger's to say.
    """

    def __init__(
        self,
        capacity_samples: int,
        capacity_bytes: int | None,
        max_staleness: int,
        lease_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        if capacity_samples < 1 or max_staleness < 0 or lease_timeout_s <= 0:
            raise BufferError(
                "a replay buffer needs capacity_samples >= 1, max_staleness >= 0 and lease_timeout_s > 0; got "
                f"{capacity_samples}, {max_staleness} and {lease_timeout_s}"
            )
        self.capacity_samples = capacity_samples
        self.capacity_bytes = capacity_bytes
        self.max_staleness = max_staleness
        self.lease_timeout_s = lease_timeout_s
        self._clock = clock
        self._version = 0
        self._next_lease = 0
        self._places = Places(capacity_samples)

    @property
    def running(self) -> int:
        """Samples reserved and not yet committed."""
        return self._places.running

    @property
    def accepted(self) -> int:
        """Samples ever committed and not dropped: trained, leased and ready. What `AdmissionRule` counts."""
        return self._places.trained + len(self._places.held)

    @property
    def bytes(self) -> int:
        """Bytes of the ready and leased entries."""
        return self._places.bytes

    def reserve(self, samples: int, version: int, again: bool = False) -> Reservation | None:
        """A place for `samples` samples, or None while the buffer has no room for them.

        Args:
            version: of the weights that the generators hold; no token will come from an older one.
            again: they had a place before; bytes may be full then, for what was admitted once is finished.
        """
        if samples < 1:
            raise BufferError(f"cannot reserve {samples} samples; reserve at least one")
        return None if self._bytes_full() and not again else self._places.open(samples, version)

    def commit(
        self, reservation: Reservation, ref: Any, keys: Iterable[SampleKey], min_version: int, nbytes: int
    ) -> CommitOutcome:
        """Fill a place with a reference to finished experience.

        Args:
            ref: opaque reference to the experience.
            keys: its samples, as many as were reserved.
            min_version: oldest weight version among its response tokens.
            nbytes: its size. Work with a reservation may exceed the capacity in bytes; no new place is given then.

        Returns:
            READY when held; STALE or AHEAD when refused, which closes the reservation.

        Raises:
            BufferError: the reservation is not open (a second commit), the number of keys differs from it, a key is
                held already or named twice, or a number is negative. The buffer is unchanged then.
        """
        self._check_open(reservation)
        entry = Entry(reservation.order, ref, tuple(keys), min_version, nbytes)
        if entry.samples != reservation.samples:
            raise BufferError(
                f"commit of place {entry.order}: {entry.samples} keys for a reservation of {reservation.samples}"
            )
        self._places.check(entry)
        self._places.close(reservation)
        if not self._fresh(entry):
            return CommitOutcome.AHEAD if entry.min_version > self._version else CommitOutcome.STALE
        self._places.hold(entry)
        return CommitOutcome.READY

    def lease(self, samples: int, version: int) -> Lease | None:
        """Lend exactly `samples` fresh samples for the update of `version`, or None while there are not enough.

        Entries that are not fresh are passed over; `evict` drops them.

        Raises:
            BufferError: whole chunks do not add up to `samples`, or waiting longer could never help.
        """
        if samples < 1:
            raise BufferError(f"cannot lease {samples} samples; lease at least one")
        self._version = version
        chosen = self._oldest(samples)
        if chosen is None:
            self._check_not_stuck(samples)
            return None
        lease = Lease(self._next_lease, tuple(chosen), version, self._clock() + self.lease_timeout_s)
        self._next_lease += 1
        self._places.lend(lease)
        return lease

    def ack(self, lease: Lease, trained_version: int) -> None:
        """The lease was trained on, by the update that started from `trained_version`.

        Raises:
            BufferError: the lease is not out (acknowledged, released or expired before), or was for another version.
        """
        self._check_out(lease, "ack")
        if trained_version != lease.version:
            raise BufferError(
                f"ack of lease {lease.number}: trained from version {trained_version}, but its samples were found "
                f"fresh for version {lease.version}; name the version that the update started from"
            )
        self._places.train(lease)

    def release(self, lease: Lease) -> None:
        """The lease was not trained on: its entries come back to their places.

        Raises:
            BufferError: the lease is not out.
        """
        self._check_out(lease, "release")
        self._places.take_back(lease)

    def expire(self) -> list[Lease]:
        """Bring leases back whose deadline has passed. A late `ack` of one is refused: another may hold its samples."""
        now = self._clock()
        overdue = [lease for lease in self._places.leases.values() if lease.deadline <= now]
        for lease in overdue:
            self.release(lease)
        return overdue

    def evict(self, version: int) -> list[Eviction]:
        """The policy is at `version` now: drop the ready entries that may no longer be trained, and return them."""
        self._version = version
        dropped = [entry for entry in self._places.ready_entries() if not self._fresh(entry)]
        for entry in dropped:
            self._places.drop(entry)
        return [Eviction(entry, staleness(entry.min_version, version)) for entry in dropped]

    def trim(self, batch: int) -> list[Entry | Reservation]:
        """Drop what batches of `batch` samples, formed in admission order from the present version on, would not train
        in time, as after a resume with a smaller bound; what is under way counts as made by the present version.

        Returns:
            the places that were dropped, in admission order: ready entries, and reservations, which are closed.
        """
        dropped: list[Entry | Reservation] = []
        kept = 0
        for order in sorted(self._places.ready.keys() | self._places.reserved.keys()):
            place = self._places.ready.get(order) or self._places.reserved[order]
            made_by = place.min_version if isinstance(place, Entry) else self._version
            if is_fresh(made_by, self._version + (kept + place.samples - 1) // batch, self.max_staleness):
                kept += place.samples
                continue
            dropped.append(place)
            if isinstance(place, Entry):
                self._places.drop(place)
            else:
                self._places.close(place)
        return dropped

    def stats(self) -> BufferStats:
        """Counts and bytes now."""
        ready = self._places.samples_ready
        return BufferStats(
            samples_ready=ready,
            samples_reserved=self.running,
            samples_leased=len(self._places.held) - ready,
            bytes=self.bytes,
        )

    def ready_entries(self) -> list[Entry]:
        """The ready entries in admission order: what a checkpoint has to save the bytes of."""
        return self._places.ready_entries()

    def leases(self) -> list[Lease]:
        """The leases that are out, oldest first."""
        return list(self._places.leases.values())

    def state_dict(self) -> dict[str, Any]:
        """Everything but the references, as plain JSON types. Save the bytes of `ready_entries` beside it.

        Raises:
            BufferError: a lease is out, so nobody can say yet whether its samples are trained.
        """
        return {"version": self._version, **self._places.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], refs: Mapping[int, Any]) -> list[Reservation]:
        """Resume an empty buffer from `state_dict`, which may exceed a capacity or a bound that are smaller than those
        of the buffer that gave it: call `trim` before anything is leased or reserved.

        Args:
            refs: a reference per ready entry, by its order number.

        Returns:
            The reservations that were open: start their samples again under them.

        Raises:
            BufferError: this buffer is in use, or a reference is missing.
        """
        self._version = state["version"]
        return self._places.load_state_dict(state, refs, self._version)

    def _oldest(self, samples: int) -> list[Entry] | None:
        """Fresh entries of lowest order that add up to `samples`; None when some are still to come, or what they pass
        over would come too late."""
        if self._places.samples_ready < samples:
            return None
        chosen: list[Entry] = []
        passed: list[Reservation] = []
        total, orders = 0, iter(sorted(self._places.ready.keys() | self._places.reserved.keys()))
        for order in orders:
            if order in self._places.reserved:
                passed.append(self._places.reserved[order])
                continue
            entry = self._places.ready[order]
            if not self._fresh(entry):
                continue
            chosen.append(entry)
            total += entry.samples
            if total >= samples:
                break
        if total < samples:
            return None
        if total > samples:
            if passed:  # of another size, as in a run that went on with other chunks; in order they add up
                return None
            raise BufferError(
                f"cannot lease exactly {samples} samples: chunks of {[e.samples for e in chosen]} in admission "
                f"order give {total}, and chunks are not split; make the samples of a step a multiple of the chunk"
            )
        return chosen if not passed or self._can_wait(passed, orders, samples) else None

    def _can_wait(self, passed: list[Reservation], later: Iterable[int], batch: int) -> bool:
        """Whether what a batch passes over, and the places after it, can all be trained in time after it."""
        rest = [(place.samples, place.version) for place in passed]
        for order in later:
            entry = self._places.ready.get(order)
            if entry is None:
                rest.append((self._places.reserved[order].samples, self._places.reserved[order].version))
            elif self._fresh(entry):
                rest.append((entry.samples, entry.min_version))
        return in_time(rest, batch, self._version + 1, self.max_staleness)

    def _check_not_stuck(self, samples: int) -> None:
        """Raise when no later commit could ever fill the batch, instead of letting the run wait for ever."""
        if samples > self.capacity_samples:
            raise BufferError(
                f"an update needs {samples} samples and the buffer holds at most {self.capacity_samples}; "
                f"raise buffer.capacity_samples to at least {samples}"
            )
        places = self._places
        idle = not places.reserved and not places.leases and all(self._fresh(e) for e in places.ready.values())
        if idle and self._bytes_full():
            raise BufferError(
                f"the buffer is full at {self.bytes} of {self.capacity_bytes} bytes with {len(places.held)} samples, "
                f"fewer than the {samples} of an update; raise buffer.capacity_mb"
            )

    def _check_open(self, reservation: Reservation) -> None:
        if self._places.reserved.get(reservation.order) != reservation:
            raise BufferError(
                f"commit of place {reservation.order}: no such open reservation (committed twice, or of another buffer)"
            )

    def _check_out(self, lease: Lease, action: str) -> None:
        if self._places.leases.get(lease.number) is not lease:
            raise BufferError(
                f"{action} of lease {lease.number}: it is not out (acknowledged, released or expired before, "
                f"timeout {self.lease_timeout_s} s)"
            )

    def _fresh(self, entry: Entry) -> bool:
        return is_fresh(entry.min_version, self._version, self.max_staleness)

    def _bytes_full(self) -> bool:
        return self.capacity_bytes is not None and self.bytes >= self.capacity_bytes
