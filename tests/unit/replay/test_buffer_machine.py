"""Random lives of many entries against a plain model: nothing lost, nothing twice, nothing too old, none too many."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlhf_ray.records import SampleKey
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.buffer_records import CommitOutcome

CHUNK, CAPACITY = 2, 12


class BufferMachine(RuleBasedStateMachine):
    """Chunks of two samples, updates of four; keys carry the order number of the place they were committed to."""

    @initialize(eta=st.integers(0, 2), capacity_bytes=st.sampled_from([None, 40]))
    def start(self, eta, capacity_bytes):
        self.version, self.eta = 0, eta
        self.buffer = ReplayBuffer(CAPACITY, capacity_bytes, eta)
        self.open, self.made, self.leases = {}, {}, []
        self.committed, self.trained, self.dropped = set(), [], []
        self.admitted, self.trained_orders = [], []

    @rule()
    def reserve(self):
        full = self.buffer.capacity_bytes is not None and self.buffer.bytes >= self.buffer.capacity_bytes
        held = sum(self.counts())
        place = self.buffer.reserve(CHUNK, self.version)
        assert (place is None) == (full or held + CHUNK > CAPACITY)
        if place:
            self.open[place.order] = place
            self.made[place.order] = self.version
            self.admitted.append(place.order)

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 99))
    def commit(self, pick):
        order = sorted(self.open)[pick % len(self.open)]
        keys = [SampleKey(0, order, i) for i in range(CHUNK)]
        outcome = self.buffer.commit(self.open.pop(order), order, keys, self.made[order], 10)
        fresh = self.version - self.made[order] <= self.eta
        assert (outcome is CommitOutcome.READY) == fresh
        if fresh:
            self.committed.update(keys)
        else:
            self.admitted.remove(order)

    @rule()
    def lease(self):
        lease = self.buffer.lease(2 * CHUNK, self.version) if not self.stuck() else None
        if lease is None:
            return
        orders = [entry.order for entry in lease.entries]
        assert len(lease.keys) == 2 * CHUNK and orders == sorted(orders)
        assert all(0 <= self.version - self.made[order] <= self.eta for order in orders)
        if self.eta == 0:
            out = {entry.order for other in self.leases for entry in other.entries}
            left = [o for o in self.admitted if o not in out and (o in self.open or self.made[o] == self.version)]
            assert orders == left[:2]
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99))
    def ack(self, pick):
        lease = self.leases.pop(pick % len(self.leases))
        self.buffer.ack(lease, lease.version)
        self.trained += lease.keys
        for entry in lease.entries:
            self.admitted.remove(entry.order)

    @rule()
    def update_makes_a_version(self):
        self.version += 1
        for dropped in self.buffer.evict(self.version):
            assert self.version - self.made[dropped.order] > self.eta
            self.dropped += dropped.keys
            self.admitted.remove(dropped.order)

    def stuck(self):
        """Bytes full with less than an update and nothing under way: the buffer raises instead of waiting."""
        limit = self.buffer.capacity_bytes
        return limit is not None and self.buffer.bytes >= limit and not self.open

    def counts(self):
        stats = self.buffer.stats()
        return stats.samples_ready, stats.samples_reserved, stats.samples_leased

    @invariant()
    def every_committed_key_is_in_exactly_one_state(self):
        ready = [key for entry in self.buffer.ready_entries() for key in entry.keys]
        leased = [key for lease in self.leases for key in lease.keys]
        everywhere = ready + leased + self.trained + self.dropped
        assert len(everywhere) == len(set(everywhere)) and set(everywhere) == self.committed
        assert self.buffer.accepted == len(self.committed) - len(self.dropped)
        assert self.counts() == (len(ready), CHUNK * len(self.open), len(leased))

    @invariant()
    def capacity_is_never_exceeded(self):
        assert sum(self.counts()) <= CAPACITY


BufferMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestBufferMachine = BufferMachine.TestCase
