"""The replay buffer: chunks in the order of admission, reserved, ready or leased, with references to experience."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rlhf_ray.errors import BufferError
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.chunk import BufferStats, Chunk, CommitOutcome, Lease, Phase, Place
from rlhf_ray.replay.staleness import in_time, is_fresh


class ReplayBuffer:
    """Experience between generation and learning. Not thread-safe: for the coordinator's event loop only.

    The life of a chunk:

        reserve ──► commit ──► ready ──► lease ──► ack      trained, gone
           │          └► stale   └► evict                   dropped, keys returned
           └► split: the rest gets a place of its own, right behind

    *Reserve* takes a place before generation starts, so a full buffer stops new work and never finished work. The
    place has an admission number, and batches are formed in the order of these numbers. A straggler is passed over as
    long as it, and everything that is left, can still be trained within the bound (`staleness.in_time`); then a lease
    waits for it. So nothing that was admitted in time grows too old, and at max_staleness 0 a batch is exactly the
    oldest admitted samples, bit for bit the same whatever finished first.
    *Split* divides a place when some of its samples leave the run (without a score, or filtered by dynamic sampling):
    those that stay are committed without the others, and samples that replace these come right behind them in the order
    of admission. All parts are leased together.
    *Commit* puts a reference into the place. Experience that is too stale is refused, which closes the place.
    *Lease* lends exactly as many samples as an update needs, all of them fresh at the given version. *Ack* marks them
    as trained. An update that fails ends the loop: the run continues from a checkpoint, which has these samples.
    *Evict* drops ready chunks that may no longer be trained at the given version, and returns them.

    Call `evict` whenever the policy's version changes, before generators receive it: a commit is compared with the
    version of the last such call, and refused when its version is ahead of that.
    The buffer knows the samples it holds; the ledger guarantees that none is trained twice in a run.

    Example:
        >>> buffer = ReplayBuffer(capacity_samples=8, capacity_bytes=None, max_staleness=0)
        >>> chunk = buffer.reserve(2, version=0)
        >>> chunk.keys = [SampleKey(0, 7, 0), SampleKey(0, 7, 1)]
        >>> chunk.fill("a reference", min_version=0, nbytes=100)
        >>> buffer.commit(chunk)
        <CommitOutcome.READY: 'ready'>
        >>> lease = buffer.lease(2, version=0)
        >>> lease.experiences
        ['a reference']
        >>> buffer.ack(lease, trained_version=0)
        >>> buffer.accepted
        2
    """

    def __init__(self, capacity_samples: int, capacity_bytes: int | None, max_staleness: int) -> None:
        self.capacity_samples = capacity_samples
        self.capacity_bytes = capacity_bytes
        self.max_staleness = max_staleness
        self.bytes = 0
        """Bytes of the ready and leased experience."""
        self._reserved: dict[Place, Chunk] = {}
        self._samples_in: Counter[Phase] = Counter()
        """Samples of the reserved chunks by phase. A sum, because it is read for every chunk, of which there may be
        thousands."""
        self._ready: dict[Place, Chunk] = {}
        self._leases: dict[int, Lease] = {}
        self._held: set[SampleKey] = set()
        """Keys of the ready and leased chunks."""
        self._samples_ready = 0
        self._trained = 0
        """Samples acknowledged so far."""
        self._version = 0
        self._next_order = 0
        self._next_lease = 0

    @property
    def accepted(self) -> int:
        """Samples ever committed and not dropped: trained, leased and ready. What `AdmissionRule` counts."""
        return self._trained + len(self._held)

    @property
    def running(self) -> int:
        """Samples reserved and not yet committed."""
        return self._samples_in.total()

    def samples_in(self, phase: Phase) -> int:
        """Samples of the reserved chunks in a phase."""
        return self._samples_in[phase]

    # The life of a chunk

    def reserve(self, samples: int, version: int, again: bool = False) -> Chunk | None:
        """A chunk with room for `samples` samples and no keys yet, or None while the buffer has no room for them.

        Args:
            version: of the weights that the generators hold; no token will be sampled with an older one.
            again: they had a place before; the capacity in bytes is ignored then, so that admitted samples are
                finished.
        """
        if self.running + len(self._held) + samples > self.capacity_samples or (self._bytes_full() and not again):
            return None
        chunk = Chunk(Place(self._next_order), samples, version)
        self._next_order += 1
        self._open(chunk)
        return chunk

    def enter(self, chunk: Chunk, phase: Phase, now: float) -> None:
        """Note that a reserved chunk begins a phase at the time `now`.

        Raises:
            BufferError: it is not reserved.
        """
        self._check_open(chunk)
        self._samples_in[chunk.phase] -= chunk.samples
        self._samples_in[phase] += chunk.samples
        chunk.phase = phase
        chunk.since = now

    def split(self, chunk: Chunk, kept: Sequence[SampleKey]) -> Chunk:
        """Divide a reserved chunk that loses samples: it keeps `kept`, some of its keys, and its place.

        Returns:
            A reserved chunk without keys for as many samples as left. Its place is behind that of `chunk` and of what
            was split from `chunk` before; it is that of `chunk`, which is reserved no longer, if none are kept.

        Raises:
            BufferError: the chunk is not reserved.
        """
        self._check_open(chunk)
        if not kept:
            rest = Chunk(chunk.place, chunk.samples, chunk.version, draws=chunk.draws, filtered=chunk.filtered)
            self._close(chunk)
            chunk.keys = []
            self._open(rest)
            return rest
        order, part = chunk.place
        leased = [one.place for lease in self._leases.values() for one in lease.chunks]
        parts = [place.part for place in (*self._reserved, *self._ready, *leased) if place.order == order]
        earlier = [each[len(part)] for each in parts if each[: len(part)] == part != each]
        rest = Chunk(Place(order, (*part, 1 + max(earlier, default=0))), chunk.samples - len(kept), chunk.version,
                     draws=chunk.draws)
        self._close(chunk)
        chunk.keys = list(kept)
        chunk.samples = len(kept)
        self._open(chunk)
        self._open(rest)
        return rest

    def commit(self, chunk: Chunk) -> CommitOutcome:
        """Make a reserved chunk ready, which is filled with the experience of its keys. A commit may exceed the
        capacity in bytes; no new place is reserved then.

        Returns:
            READY when held; STALE or AHEAD when refused, which closes the place.

        Raises:
            BufferError: the chunk is not reserved (a second commit), the number of its keys differs from its samples, a
                key is held already or named twice, or a number is negative. The buffer is unchanged then.
        """
        self._check_open(chunk)
        if not chunk.complete:
            raise BufferError(
                f"commit of place {chunk.place}: {len(chunk.keys)} keys for a reservation of {chunk.samples}"
            )
        self._check_new(chunk)
        self._close(chunk)
        if not self._fresh(chunk):
            return CommitOutcome.AHEAD if chunk.min_version > self._version else CommitOutcome.STALE
        self._hold(chunk)
        return CommitOutcome.READY

    def lease(self, samples: int, version: int) -> Lease | None:
        """Lend exactly `samples` fresh samples for the update of `version`, or None while there are not enough.

        Chunks that are not fresh are passed over; `evict` drops them.

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
        for chunk in chosen:
            self._take_ready(chunk)
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
        self.bytes -= sum(chunk.nbytes for chunk in lease.chunks)
        self._trained += lease.samples

    def give_back(self, lease: Lease) -> None:
        """Make the chunks of a lease ready again, because no update was begun with them.

        Raises:
            BufferError: the lease is not out.
        """
        if self._leases.get(lease.number) is not lease:
            raise BufferError(f"give_back of lease {lease.number}: it is not out (acknowledged before, or of another "
                              "buffer)")
        del self._leases[lease.number]
        for chunk in lease.chunks:
            self._ready[chunk.place] = chunk
            self._samples_ready += chunk.samples

    def evict(self, version: int) -> list[Chunk]:
        """Drop the ready chunks that may no longer be trained now that the policy is at `version`, and return them.
        Their samples must be generated again."""
        self._version = version
        dropped = [chunk for chunk in self.ready() if not self._fresh(chunk)]
        for chunk in dropped:
            self._drop(chunk)
        return dropped

    def reopen(self, chunk: Chunk) -> None:
        """Make a ready chunk reserved again, with its place and its keys: its samples are to be generated once more."""
        self._drop(chunk)
        chunk.forget()
        chunk.phase = Phase.ADMITTED
        self._open(chunk)

    def trim(self, batch: int) -> list[Chunk]:
        """Drop what batches of `batch` samples, formed in admission order from the present version on, would not train
        in time, as after a resume with a smaller bound; samples under way count as generated by the present version.
        If a part of a chunk is dropped, so are the others: what is left adds up to batches.

        Returns:
            the dropped chunks in admission order: ready ones, and reserved ones, whose places are closed.
        """
        dropped: list[Chunk] = []
        kept = 0
        for _, parts_of_chunk in groupby(self._in_order(), key=lambda chunk: chunk.place.order):
            parts = list(parts_of_chunk)
            samples = sum(part.samples for part in parts)
            made_by = min(part.min_version if part.place in self._ready else self._version for part in parts)
            if is_fresh(made_by, self._version + (kept + samples - 1) // batch, self.max_staleness):
                kept += samples
                continue
            dropped += parts
            for part in parts:
                if part.place in self._ready:
                    self._drop(part)
                else:
                    self._close(part)
        return dropped

    # What it holds

    def stats(self) -> BufferStats:
        """Counts and bytes now."""
        return BufferStats(samples_ready=self._samples_ready, samples_reserved=self.running,
                           samples_leased=len(self._held) - self._samples_ready, bytes=self.bytes)

    def under_way(self) -> list[Chunk]:
        """The reserved chunks in admission order."""
        return [self._reserved[place] for place in sorted(self._reserved)]

    def ready(self) -> list[Chunk]:
        """The ready chunks in admission order; a checkpoint has to save the bytes of their experience."""
        return [self._ready[place] for place in sorted(self._ready)]

    def leases(self) -> list[Lease]:
        """The leases that are out, oldest first."""
        return list(self._leases.values())

    def state_dict(self) -> dict[str, Any]:
        """Everything but references and the keys of reserved chunks, as plain JSON types. Save the experience of
        `ready`, and the keys of `under_way`, beside it.

        Raises:
            BufferError: a lease is out, so it is unknown whether its samples are trained.
        """
        if self._leases:
            raise BufferError(f"cannot save with leases {sorted(self._leases)} out; acknowledge them first")
        return {
            "version": self._version,
            "trained": self._trained,
            "next_order": self._next_order,
            "reserved": [[chunk.place.plain(), chunk.samples, chunk.draws, chunk.filtered]
                         for chunk in self.under_way()],
            "ready": [_ready_state(chunk) for chunk in self.ready()],
        }

    def load_state_dict(self, state: Mapping[str, Any], experiences: Mapping[int | str, Any],
                        summaries: Mapping[int | str, Any] | None = None) -> list[Chunk]:
        """Resume an empty buffer from `state_dict`, which may exceed a capacity or a bound that are smaller than those
        of the buffer that gave it: call `trim` before anything is leased or reserved.

        Args:
            experiences: a reference per ready chunk, by its place as in the state.
            summaries: of ready chunks, by their places.

        Returns:
            The reserved chunks, which lack their keys: generate their samples again.
        """
        for saved in state["ready"]:
            keys = [SampleKey(*key) for key in saved["keys"]]
            chunk = Chunk(Place.from_plain(saved["order"]), len(keys), state["version"], keys,
                          filtered=saved["filtered"])
            summary = (summaries or {}).get(saved["order"])
            chunk.fill(experiences[saved["order"]], saved["min_version"], saved["nbytes"], summary)
            self._check_new(chunk)
            self._hold(chunk)
        self._version = state["version"]
        self._trained = state["trained"]
        self._next_order = state["next_order"]
        for place, samples, draws, filtered in state["reserved"]:
            self._open(Chunk(Place.from_plain(place), samples, self._version, draws=draws, filtered=filtered))
        return self.under_way()

    # Batches

    def _in_order(self) -> list[Chunk]:
        """All ready and reserved chunks, in admission order."""
        places = sorted(self._ready.keys() | self._reserved.keys())
        return [self._ready.get(place) or self._reserved[place] for place in places]

    def _oldest(self, samples: int) -> list[Chunk] | None:
        """Fresh chunks of lowest places that add up to `samples`; None when there are not enough, or when those they
        pass over would grow too old.

        The parts of one admission number are trained together, so that what is left adds up to batches, too.
        """
        if self._samples_ready < samples:
            return None
        chosen: list[Chunk] = []
        passed: list[tuple[int, int]] = []  # (samples, oldest version) of chunks to be trained by later updates
        total = 0
        incomplete = {place.order for place in self._reserved}
        later = iter(self._in_order())
        for chunk in later:
            if chunk.place in self._reserved:
                passed.append((chunk.samples, chunk.version))
            elif not self._fresh(chunk):
                continue
            elif chunk.place.order in incomplete or total + chunk.samples > samples:  # (another size, after a resume)
                passed.append((chunk.samples, chunk.min_version))
            else:
                chosen.append(chunk)
                total += chunk.samples
                if total == samples:
                    break
        if total < samples:
            self._check_can_add_up(samples)
            return None
        # Where nothing is under way, waiting helps none of those that are passed over.
        return chosen if not passed or not self._reserved or self._can_wait(passed, later, samples) else None

    def _can_wait(self, passed: list[tuple[int, int]], later: Iterable[Chunk], batch: int) -> bool:
        """Whether the chunks that a batch passes over, and those after it, can all be trained in time after it."""
        rest = list(passed)
        for chunk in later:
            if chunk.place in self._reserved:
                rest.append((chunk.samples, chunk.version))
            elif self._fresh(chunk):
                rest.append((chunk.samples, chunk.min_version))
        return in_time(rest, batch, self._version + 1, self.max_staleness)

    def _check_can_add_up(self, samples: int) -> None:
        """Raise when enough samples are ready, nothing is under way, and whole chunks do not add up to a batch."""
        fresh = [chunk.samples for chunk in self.ready() if self._fresh(chunk)]
        if sum(fresh) >= samples and not self._reserved:
            raise BufferError(
                f"cannot lease exactly {samples} samples: chunks of {fresh} in admission order do not add up to them, "
                "and a batch takes whole chunks; make the samples of a step a multiple of the chunk"
            )

    def _check_not_stuck(self, samples: int) -> None:
        """Raise when no later commit could ever fill the batch, so that the run does not wait without end."""
        idle = not self._reserved and not self._leases and all(self._fresh(chunk) for chunk in self._ready.values())
        if idle and self._bytes_full():
            raise BufferError(
                f"the buffer is full at {self.bytes} of {self.capacity_bytes} bytes with {len(self._held)} samples, "
                f"fewer than the {samples} of an update; raise buffer.capacity_mb"
            )

    # Places

    def _open(self, chunk: Chunk) -> None:
        self._reserved[chunk.place] = chunk
        self._samples_in[chunk.phase] += chunk.samples

    def _close(self, chunk: Chunk) -> None:
        del self._reserved[chunk.place]
        self._samples_in[chunk.phase] -= chunk.samples

    def _hold(self, chunk: Chunk) -> None:
        """Make a checked chunk ready."""
        chunk.phase = Phase.READY
        self._ready[chunk.place] = chunk
        self._samples_ready += chunk.samples
        self._held.update(chunk.keys)
        self.bytes += chunk.nbytes

    def _drop(self, chunk: Chunk) -> None:
        """Remove a ready chunk."""
        self._take_ready(chunk)
        self._held.difference_update(chunk.keys)
        self.bytes -= chunk.nbytes

    def _take_ready(self, chunk: Chunk) -> None:
        del self._ready[chunk.place]
        self._samples_ready -= chunk.samples

    def _check_open(self, chunk: Chunk) -> None:
        if self._reserved.get(chunk.place) is not chunk:
            raise BufferError(
                f"place {chunk.place}: no such open reservation (committed twice, or of another buffer)"
            )

    def _check_new(self, chunk: Chunk) -> None:
        """Raise BufferError unless the numbers make sense and all keys are new here."""
        if chunk.min_version < 0 or chunk.nbytes < 0:
            raise BufferError(
                f"place {chunk.place}: min_version={chunk.min_version} and nbytes={chunk.nbytes} must not be negative "
                "(a negative version means that no response token has one)"
            )
        repeated = [key for key, times in Counter(chunk.keys).items() if times > 1 or key in self._held]
        if repeated:
            raise BufferError(f"place {chunk.place}: duplicate samples {repeated[:3]} ({len(repeated)} in all)")

    def _fresh(self, chunk: Chunk) -> bool:
        return is_fresh(chunk.min_version, self._version, self.max_staleness)

    def _bytes_full(self) -> bool:
        return self.capacity_bytes is not None and self.bytes >= self.capacity_bytes


def _ready_state(chunk: Chunk) -> dict[str, Any]:
    keys = [list(key.numbers) for key in chunk.keys]
    return {"order": chunk.place.plain(), "keys": keys, "min_version": chunk.min_version, "nbytes": chunk.nbytes,
            "filtered": chunk.filtered}
