"""Random lives of many chunks against a plain model: nothing lost, nothing twice, nothing too old, none too many."""

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlhf_ray.records import SampleKey
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.chunk import CommitOutcome

CHUNK, CAPACITY = 2, 12


class BufferMachine(RuleBasedStateMachine):
    """Chunks of two samples, of which one may be replaced; updates of two or four. `made` has the version of each
    place."""

    @initialize(eta=st.integers(0, 2), capacity_bytes=st.sampled_from([None, 40]), chunks=st.integers(1, 2))
    def start(self, eta, capacity_bytes, chunks):
        self.batch = chunks * CHUNK
        self.version, self.eta = 0, eta
        self.buffer = ReplayBuffer(CAPACITY, capacity_bytes, eta)
        self.open, self.made, self.leases = {}, {}, []
        self.committed, self.trained, self.dropped = set(), [], []
        self.admitted = []
        """Places that are not trained and not dropped, in the order in which they are trained at staleness 0."""
        self.rows = count()
        self.has_dropped = False

    def new_keys(self, samples):
        return [SampleKey(0, next(self.rows), 0) for _ in range(samples)]

    @rule()
    def reserve(self):
        full = self.buffer.capacity_bytes is not None and self.buffer.bytes >= self.buffer.capacity_bytes
        held = sum(self.counts())
        chunk = self.buffer.reserve(CHUNK, self.version)
        assert (chunk is None) == (full or held + CHUNK > CAPACITY)
        if chunk:
            chunk.keys = self.new_keys(CHUNK)
            self.open[chunk.place] = chunk
            self.made[chunk.place] = self.version
            self.admitted.append(chunk.place)

    @precondition(lambda self: self.open)
    @rule(kept=st.integers(0, 1))
    def lose_samples(self, kept):
        """One of each whole chunk that is under way, or both."""
        for chunk in list(self.open.values()):
            if chunk.samples == CHUNK:
                self.lose(chunk, kept)

    def lose(self, chunk, kept):
        rest = self.buffer.split(chunk, chunk.keys[:kept])
        rest.keys = self.new_keys(rest.samples)
        assert (rest.place == chunk.place) == (kept == 0)
        self.open[rest.place] = rest
        if kept:
            self.made[rest.place] = self.made[chunk.place]
            self.admitted.insert(self.admitted.index(chunk.place) + 1, rest.place)

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 99))
    def commit(self, pick):
        place = sorted(self.open)[pick % len(self.open)]
        chunk = self.open.pop(place)
        chunk.fill("a reference", self.made[place], 10)
        outcome = self.buffer.commit(chunk)
        fresh = self.version - self.made[place] <= self.eta
        assert (outcome is CommitOutcome.READY) == fresh
        if fresh:
            self.committed.update(chunk.keys)
        else:
            self.has_dropped = True
            self.admitted.remove(place)

    @rule()
    def lease(self):
        if self.stuck():
            return
        lease = self.buffer.lease(self.batch, self.version)
        if lease is None:
            fresh = sum(chunk.samples for chunk in self.buffer.ready() if self.is_fresh(chunk))
            assert self.open or self.has_dropped or fresh < self.batch, "nothing is under way, and a batch is there"
            return
        orders = {chunk.place.order for chunk in lease.chunks}
        assert not orders & {place.order for place in self.open}, "parts are trained together"
        places = [chunk.place for chunk in lease.chunks]
        assert len(lease.keys) == self.batch and places == sorted(places)
        assert all(0 <= self.version - self.made[place] <= self.eta for place in places)
        if self.eta == 0:
            out = {chunk.place for other in self.leases for chunk in other.chunks}
            left = [place for place in self.admitted if place not in out and (
                place in self.open or self.made[place] == self.version)]
            assert places == left[:len(places)]
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99))
    def ack(self, pick):
        lease = self.leases.pop(pick % len(self.leases))
        self.buffer.ack(lease, lease.version)
        self.trained += lease.keys
        for chunk in lease.chunks:
            self.admitted.remove(chunk.place)

    @rule()
    def update_makes_a_version(self):
        self.version += 1
        for dropped in self.buffer.evict(self.version):
            assert self.version - self.made[dropped.place] > self.eta
            self.dropped += dropped.keys
            self.has_dropped = True
            self.admitted.remove(dropped.place)

    def is_fresh(self, chunk):
        return self.version - self.made[chunk.place] <= self.eta

    def stuck(self):
        """Nothing under way and less than an update with bytes full, or chunks that do not add up to one after a part
        of one was dropped: the buffer raises instead of waiting."""
        limit = self.buffer.capacity_bytes
        full = limit is not None and self.buffer.bytes >= limit
        parts = self.has_dropped and any(chunk.samples < CHUNK for chunk in self.buffer.ready())
        return not self.open and (full or parts)

    def counts(self):
        stats = self.buffer.stats()
        return stats.samples_ready, stats.samples_reserved, stats.samples_leased

    @invariant()
    def every_committed_key_is_in_exactly_one_state(self):
        ready = [key for chunk in self.buffer.ready() for key in chunk.keys]
        leased = [key for lease in self.leases for key in lease.keys]
        everywhere = ready + leased + self.trained + self.dropped
        assert len(everywhere) == len(set(everywhere)) and set(everywhere) == self.committed
        assert self.buffer.accepted == len(self.committed) - len(self.dropped)
        reserved = sum(chunk.samples for chunk in self.open.values())
        assert self.counts() == (len(ready), reserved, len(leased)) and self.buffer.running == reserved

    @invariant()
    def what_is_under_way_is_in_admission_order(self):
        assert [chunk.place for chunk in self.buffer.under_way()] == sorted(self.open)

    @invariant()
    def capacity_is_never_exceeded(self):
        assert sum(self.counts()) <= CAPACITY


BufferMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestBufferMachine = BufferMachine.TestCase
