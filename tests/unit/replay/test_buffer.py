"""Every path of an entry's life in the replay buffer."""

import json
from itertools import count
from random import Random

import pytest

from rlhf_ray.errors import BufferError
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.chunk import CommitOutcome, Phase, Place
from rlhf_ray.replay.staleness import AdmissionRule


def make(capacity=16, nbytes=None, eta=0):
    return ReplayBuffer(capacity, nbytes, eta)


def keys(chunk):
    return [SampleKey(0, chunk.place.order, i) for i in range(chunk.samples)]


def commit(buffer, chunk, version=0, nbytes=10):
    chunk.keys = chunk.keys or keys(chunk)
    chunk.fill(f"ref{chunk.place}", version, nbytes)
    return buffer.commit(chunk)


def reserve_with(buffer, samples, *given):
    chunk = buffer.reserve(samples, 0)
    chunk.keys = list(given)
    return chunk


def filled(buffer, chunks, version=0):
    for samples in chunks:
        assert commit(buffer, buffer.reserve(samples, 0), version) is CommitOutcome.READY
    return buffer


def counts(buffer):
    s = buffer.stats()
    return s.samples_ready, s.samples_reserved, s.samples_leased


def test_a_chunk_goes_from_reserved_to_trained():
    buffer = make()
    place = buffer.reserve(4, 0)
    assert counts(buffer) == (0, 4, 0) and buffer.running == 4 and buffer.accepted == 0
    assert commit(buffer, place) is CommitOutcome.READY
    assert counts(buffer) == (4, 0, 0) and buffer.bytes == 10 and buffer.accepted == 4
    lease = buffer.lease(4, version=0)
    assert counts(buffer) == (0, 0, 4) and lease.experiences == ["ref0"] and lease.keys == keys(place)
    assert buffer.bytes == 10
    buffer.ack(lease, trained_version=0)
    assert counts(buffer) == (0, 0, 0) and buffer.bytes == 0 and buffer.accepted == 4 and buffer.running == 0


def test_reserve_is_refused_when_samples_would_exceed_capacity():
    buffer = make(capacity=8)
    filled(buffer, [2])
    assert buffer.lease(2, 0) is not None
    filled(buffer, [2])
    assert buffer.reserve(2, 0) is not None
    assert buffer.reserve(3, 0) is None
    assert buffer.reserve(2, 0) is not None
    assert buffer.reserve(1, 0) is None


def test_reserve_is_refused_while_bytes_are_full_but_reserved_work_may_still_commit():
    buffer = make(nbytes=20, eta=1)
    first, second = buffer.reserve(1, 0), buffer.reserve(1, 0)
    commit(buffer, first, nbytes=20)
    assert buffer.reserve(1, 0) is None
    assert commit(buffer, second, nbytes=20) is CommitOutcome.READY
    assert buffer.bytes == 40
    buffer.ack(buffer.lease(2, 0), 0)
    assert buffer.reserve(1, 0) is not None


def test_a_second_commit_is_refused():
    buffer = make()
    place = buffer.reserve(2, 0)
    commit(buffer, place)
    with pytest.raises(BufferError, match="committed twice"):
        commit(buffer, place)
    assert counts(buffer) == (2, 0, 0)


def test_commit_with_another_number_of_keys_is_refused_and_leaves_the_place_open():
    buffer = make()
    place = reserve_with(buffer, 2, SampleKey(0, 0, 0))
    with pytest.raises(BufferError, match="1 keys for a reservation of 2"):
        commit(buffer, place)
    assert counts(buffer) == (0, 2, 0)
    place.keys = keys(place)
    assert commit(buffer, place) is CommitOutcome.READY


@pytest.mark.parametrize("leased", [False, True])
def test_a_key_that_is_held_already_is_refused(leased):
    buffer = filled(make(), [1])
    if leased:
        buffer.lease(1, 0)
    place = reserve_with(buffer, 1, SampleKey(0, 0, 0))
    with pytest.raises(BufferError, match="duplicate samples"):
        commit(buffer, place)


def test_a_key_named_twice_in_one_commit_is_refused():
    buffer = make()
    place = reserve_with(buffer, 2, *[SampleKey(0, 0, 0)] * 2)
    with pytest.raises(BufferError, match="duplicate samples"):
        commit(buffer, place)


@pytest.mark.parametrize(("version", "nbytes"), [(-1, 1), (0, -1)])
def test_negative_version_or_size_is_refused(version, nbytes):
    buffer = make()
    with pytest.raises(BufferError, match="must not be negative"):
        commit(buffer, buffer.reserve(1, 0), version, nbytes)


def test_stale_and_future_commits_are_refused_with_an_outcome_and_close_the_place():
    buffer = make(eta=1)
    stale, fresh, ahead = buffer.reserve(1, 0), buffer.reserve(1, 0), buffer.reserve(1, 0)
    buffer.evict(5)
    assert commit(buffer, stale, version=3) is CommitOutcome.STALE
    assert commit(buffer, fresh, version=4) is CommitOutcome.READY
    assert commit(buffer, ahead, version=6) is CommitOutcome.AHEAD
    assert counts(buffer) == (1, 0, 0) and buffer.accepted == 1


def test_in_order_lease_waits_for_the_oldest_and_follows_admission():
    buffer = make()
    places = [buffer.reserve(2, 0) for _ in range(3)]
    commit(buffer, places[2])
    commit(buffer, places[1])
    assert buffer.lease(4, 0) is None
    commit(buffer, places[0])
    assert buffer.lease(4, 0).experiences == ["ref0", "ref1"]
    assert buffer.lease(2, 0).experiences == ["ref2"]


def test_overlapping_lease_passes_over_a_straggler_in_admission_order():
    buffer = make(eta=1)
    places = [buffer.reserve(2, 0) for _ in range(4)]
    for i in (3, 1, 2):
        commit(buffer, places[i])
    assert buffer.lease(4, 0).experiences == ["ref1", "ref2"]


def test_a_straggler_that_could_not_be_trained_later_is_waited_for():
    buffer = make(eta=1)
    places = [buffer.reserve(2, 0) for _ in range(4)]
    for i in (1, 2, 3):
        commit(buffer, places[i])
    assert buffer.lease(2, 0) is None, "the three others need versions 1, 2 and 3, and are too old for the last two"
    first = buffer.lease(4, 0)
    assert first.experiences == ["ref1", "ref2"]
    buffer.ack(first, 0)
    assert buffer.evict(1) == [] and buffer.lease(2, 1) is None, "its last chance"
    commit(buffer, places[0])
    assert buffer.lease(4, 1).experiences == ["ref0", "ref3"]


def test_samples_that_start_later_may_be_passed_over_for_longer():
    buffer = make(eta=1)
    buffer.evict(3)
    straggler, other = buffer.reserve(2, 3), buffer.reserve(2, 3)
    commit(buffer, other, version=3)
    assert buffer.lease(2, 3).experiences == ["ref1"]
    assert buffer.evict(4) == [] and commit(buffer, straggler, version=3) is CommitOutcome.READY


def test_too_few_ready_samples_give_no_lease_and_leave_them_ready():
    buffer = filled(make(eta=1), [2])
    assert buffer.lease(4, 0) is None
    assert counts(buffer) == (2, 0, 0)


def test_chunks_that_do_not_add_up_are_an_error_and_stay_ready():
    buffer = filled(make(eta=1), [3, 3])
    with pytest.raises(BufferError, match=r"exactly 4 samples: chunks of \[3, 3\]"):
        buffer.lease(4, 0)
    assert counts(buffer) == (6, 0, 0)


def test_a_byte_capacity_too_small_for_an_update_is_an_error_rather_than_a_wait():
    buffer = make(nbytes=15, eta=1)
    places = [buffer.reserve(1, 0), buffer.reserve(1, 0)]
    commit(buffer, places[0], nbytes=20)
    assert buffer.lease(4, 0) is None
    commit(buffer, places[1], nbytes=20)
    with pytest.raises(BufferError, match="40 of 15 bytes with 2 samples"):
        buffer.lease(4, 0)


def test_lease_passes_over_what_is_too_stale_for_its_version():
    buffer = make(eta=1)
    filled(buffer, [2])
    buffer.evict(1)
    filled(buffer, [2], version=1)
    assert buffer.lease(2, version=2).experiences == ["ref1"]


def test_a_lease_ends_once():
    buffer = filled(make(), [2])
    lease = buffer.lease(2, 0)
    buffer.ack(lease, 0)
    with pytest.raises(BufferError, match="it is not out"):
        buffer.ack(lease, 0)


def test_a_lease_that_is_given_back_is_ready_again_with_its_order_and_can_be_saved():
    buffer = filled(make(), [2, 2, 2])
    lease = buffer.lease(4, 0)
    buffer.give_back(lease)
    assert counts(buffer) == (6, 0, 0) and buffer.accepted == 6 and buffer.bytes == 30
    assert [chunk.place.order for chunk in buffer.ready()] == [0, 1, 2]
    assert len(buffer.state_dict()["ready"]) == 3
    assert buffer.lease(4, 0).experiences == lease.experiences
    for refused in (buffer.give_back, lambda given: buffer.ack(given, 0)):
        with pytest.raises(BufferError, match=f"of lease {lease.number}: it is not out"):
            refused(lease)


def test_ack_of_another_version_is_refused_and_the_lease_stays_out():
    buffer = filled(make(), [2])
    lease = buffer.lease(2, 0)
    with pytest.raises(BufferError, match="trained from version 1"):
        buffer.ack(lease, 1)
    assert counts(buffer) == (0, 0, 2)


def test_evict_returns_what_it_drops():
    buffer = make(eta=1)
    filled(buffer, [2])
    buffer.evict(1)
    filled(buffer, [1], version=1)
    assert buffer.evict(1) == []
    (dropped,) = buffer.evict(2)
    assert dropped.keys == [SampleKey(0, 0, 0), SampleKey(0, 0, 1)]
    assert counts(buffer) == (1, 0, 0) and buffer.accepted == 1


def test_evict_drops_what_is_ahead_of_a_rebuilt_policy():
    buffer = make(eta=2)
    buffer.evict(7)
    filled(buffer, [1], version=7)
    (dropped,) = buffer.evict(5)
    assert dropped.min_version == 7


def test_evicted_keys_may_be_committed_again():
    buffer = filled(make(eta=0), [1])
    buffer.evict(1)
    assert commit(buffer, reserve_with(buffer, 1, SampleKey(0, 0, 0)), version=1) is CommitOutcome.READY


def test_evict_leaves_leased_chunks_alone():
    buffer = filled(make(eta=0), [1])
    lease = buffer.lease(1, 0)
    assert buffer.evict(3) == []
    buffer.ack(lease, 0)


def test_state_resumes_ready_entries_and_open_places_through_json():
    buffer = make(eta=2)
    first = buffer.reserve(2, 0)
    filled(buffer, [2, 2])
    buffer.ack(buffer.lease(2, 0), 0)
    state = json.loads(json.dumps(buffer.state_dict()))
    resumed = make(eta=2)
    (place,) = resumed.load_state_dict(state, {2: "new2"})
    assert (place.place, place.samples, place.version) == (first.place, 2, 0) and counts(resumed) == (2, 2, 0)
    assert resumed.accepted == buffer.accepted == 4
    commit(resumed, place)
    lease = resumed.lease(4, 1)
    assert lease.experiences == ["ref0", "new2"] and lease.keys[2:] == [SampleKey(0, 2, 0), SampleKey(0, 2, 1)]
    assert resumed.reserve(1, 0).place == buffer.reserve(1, 0).place == Place(3)


def test_a_resumed_buffer_judges_commits_by_the_saved_version():
    buffer = make(eta=1)
    buffer.evict(7)
    reserved = buffer.reserve(1, 6).place
    resumed = make(eta=1)
    (place,) = resumed.load_state_dict(buffer.state_dict(), {})
    assert (place.place, place.samples) == (reserved, 1)
    assert place.version == 7, "what is made anew is made by the restored policy"
    assert commit(resumed, place, version=5) is CommitOutcome.STALE


def test_ready_chunks_are_in_admission_order():
    buffer = make()
    places = [buffer.reserve(1, 0) for _ in range(3)]
    for i in (2, 0, 1):
        commit(buffer, places[i])
    assert [chunk.place.order for chunk in buffer.ready()] == [0, 1, 2]


def test_state_with_a_lease_out_cannot_be_saved():
    buffer = filled(make(), [1])
    buffer.lease(1, 0)
    with pytest.raises(BufferError, match="acknowledge them first"):
        buffer.state_dict()


def test_chunks_of_another_size_wait_for_a_straggler_that_makes_them_add_up():
    """As in a run that went on with larger chunks."""
    buffer = make(eta=1)
    straggler = buffer.reserve(2, 0)
    filled(buffer, [2, 4])
    assert buffer.lease(4, 0) is None
    commit(buffer, straggler)
    assert [len(buffer.lease(4, 0).chunks) for _ in range(2)] == [2, 1]


def resumed_with(eta):
    """Saved at version 5 by a buffer of η = 2: places (order: version) 0: 3, 1: under way, 2: 4, 3: 5, 4: 5, 5: under
    way, of two samples each; a batch has four."""
    buffer = make(capacity=12, eta=2)
    buffer.evict(5)
    for order, version in enumerate((3, None, 4, 5, 5, None)):
        place = buffer.reserve(2, 3)
        if version is not None:
            commit(buffer, place, version)
        assert place.place == Place(order)
    resumed = make(capacity=4 * (eta + 1), eta=eta)
    resumed.load_state_dict(json.loads(json.dumps(buffer.state_dict())), dict.fromkeys(range(6), "ref"))
    return resumed


@pytest.mark.parametrize(("eta", "dropped"), [(3, []), (2, []), (1, [0, 5]), (0, [0, 2, 4, 5])])
def test_trimming_leaves_what_batches_in_admission_order_would_train_in_time(eta, dropped):
    buffer = resumed_with(eta)
    assert [chunk.place.order for chunk in buffer.trim(4)] == dropped
    assert sum(counts(buffer)) == 2 * (6 - len(dropped)) <= buffer.capacity_samples
    assert buffer.trim(4) == []


def test_what_was_trimmed_has_no_place_any_more():
    buffer = resumed_with(0)
    ready, *_, reserved = buffer.trim(4)
    assert ready.phase is Phase.READY and ready.min_version == 3
    with pytest.raises(BufferError, match="no such open reservation"):
        commit(buffer, reserved)
    assert buffer.reserve(1, 5) is None, "the two that are left are a whole batch"


def test_what_had_a_place_gets_another_one_although_bytes_are_full():
    buffer = filled(make(nbytes=10), [1])
    assert buffer.reserve(1, 0) is None and buffer.reserve(1, 0, again=True) is not None


def split_in_two(buffer, samples=4, left=1):
    """A chunk that has lost its last samples, and the one for what replaces them."""
    chunk = buffer.reserve(samples, 0)
    chunk.keys = keys(chunk)
    return chunk, buffer.split(chunk, chunk.keys[:samples - left])


def test_samples_that_replace_others_come_right_behind_those_that_stay():
    buffer = make()
    first, rest = split_in_two(buffer)
    filled(buffer, [2])
    assert (first.samples, rest.samples, rest.keys) == (3, 1, []) and counts(buffer) == (2, 4, 0)
    assert commit(buffer, first) is CommitOutcome.READY, "what stays need not wait for what replaces the others"
    rest.keys = [SampleKey(0, 9, 0)]
    assert commit(buffer, rest) is CommitOutcome.READY
    assert buffer.lease(6, 0).experiences == ["ref0", "ref0.1", "ref1"]


def test_at_staleness_0_a_batch_waits_for_what_replaces_samples_of_it():
    buffer = make()
    first, _ = split_in_two(buffer)
    filled(buffer, [4])
    commit(buffer, first)
    assert buffer.lease(4, 0) is None


def test_the_parts_of_a_chunk_are_trained_together():
    """Otherwise the chunks that are left need not add up to batches: here 4 and 2 would leave 2, 4, 4 and 6."""
    buffer = make(capacity=24, eta=2)
    first, rest = split_in_two(buffer)
    filled(buffer, [4])
    second, other = split_in_two(buffer, 4, left=2)
    commit(buffer, first)
    for chunk in (second, other):
        chunk.keys = [SampleKey(1, len(chunk.place.part), i) for i in range(2)]
        commit(buffer, chunk)
    assert buffer.lease(8, 0).experiences == ["ref1", "ref2", "ref2.1"], "what is ready of the first chunk waits"
    rest.keys = [SampleKey(0, 9, 0)]
    commit(buffer, rest)
    assert buffer.lease(4, 0).experiences == ["ref0", "ref0.1"]


def test_each_split_has_a_place_of_its_own():
    buffer = make()
    first, second = split_in_two(buffer)
    third = buffer.split(first, first.keys[:1])
    second.keys = [SampleKey(0, 9, 0)]
    empty = buffer.split(second, [])
    assert empty is not second and (second.keys, empty.keys) == ([], [])
    with pytest.raises(BufferError, match="no such open reservation"):
        buffer.enter(second, Phase.GENERATE, 0.0)
    assert buffer.under_way()[1] is empty
    assert [(chunk.place, chunk.samples) for chunk in buffer.under_way()] == [
        (Place(0), 1), (Place(0, (1,)), 1), (Place(0, (2,)), 2)]
    assert third.place == Place(0, (2,))


def test_parts_of_parts_have_the_same_places_whichever_is_split_first():
    for first_split in (0, 1):
        buffer = make(capacity=8)
        chunk = buffer.reserve(6, 0)
        chunk.keys = [SampleKey(0, row, 0) for row in range(6)]
        parts = [buffer.split(chunk, chunk.keys[:4]), buffer.split(chunk, chunk.keys[:1])]
        for number, part in enumerate(parts):
            part.keys = [SampleKey(1 + number, row, 0) for row in range(part.samples)]
        for part in (parts[first_split], parts[1 - first_split]):
            buffer.split(part, part.keys[:1])
        assert [(str(each.place), each.samples) for each in buffer.under_way()] == [
            ("0", 1), ("0.1", 1), ("0.1.1", 1), ("0.2", 1), ("0.2.1", 2)]
        assert all(Place.from_plain(each.place.plain()) == each.place for each in buffer.under_way())


def test_a_chunk_that_is_not_reserved_cannot_be_split():
    buffer = make()
    first, _ = split_in_two(buffer)
    commit(buffer, first)
    with pytest.raises(BufferError, match="no such open reservation"):
        buffer.split(first, first.keys[:1])


def test_parts_of_chunks_come_back_from_json_in_their_places():
    buffer = make(eta=1)
    first, rest = split_in_two(buffer)
    other, last = split_in_two(buffer)
    commit(buffer, first)
    last.keys = [SampleKey(0, 9, 0)]
    commit(buffer, last)
    state = json.loads(json.dumps(buffer.state_dict()))
    assert [place for place, *_ in state["reserved"]] == ["0.1", 1]
    resumed = make(eta=1)
    under_way = resumed.load_state_dict(state, {0: "ref0", "1.1": "ref1.1"})
    assert [(chunk.place, chunk.samples) for chunk in under_way] == [(rest.place, 1), (other.place, 3)]
    assert [(chunk.place, chunk.experience) for chunk in resumed.ready()] == [
        (Place(0), "ref0"), (Place(1, (1,)), "ref1.1")]


def test_a_chunk_that_does_not_fit_into_a_batch_waits_for_the_next_one():
    """As when only a part of a chunk was lost, and is admitted again behind the others."""
    buffer = filled(make(eta=1), [3, 4, 1])
    lease = buffer.lease(4, 0)
    assert lease.experiences == ["ref0", "ref2"]
    buffer.ack(lease, 0)
    assert buffer.evict(1) == [] and buffer.lease(4, 1).experiences == ["ref1"]


def test_a_chunk_that_is_opened_again_has_its_place_and_its_keys():
    buffer = filled(make(eta=1), [2, 2])
    first, _ = buffer.ready()
    buffer.reopen(first)
    assert counts(buffer) == (2, 2, 0) and buffer.bytes == 10 and buffer.accepted == 2
    assert buffer.under_way() == [first] and first.phase is Phase.ADMITTED and first.experience is None
    assert first.complete and commit(buffer, first) is CommitOutcome.READY
    assert buffer.lease(4, 0).experiences == ["ref0", "ref1"]


def test_a_part_that_is_trimmed_takes_the_others_of_its_chunk_with_it():
    """Chunks of four, batches of eight; a part of the first and of the third chunk is too old for a bound of 1. Without
    the other parts of these, [3, 4, 2, 4, 3] would be left, which do not add up from the front."""
    buffer = make(capacity=40, eta=3)
    buffer.evict(2)
    for left in (3, 0, 2, 0, 0):
        first, rest = split_in_two(buffer, 4, left) if left else (buffer.reserve(4, 0), None)
        commit(buffer, first, version=0 if left else 2)
        if rest is not None:
            rest.keys = [SampleKey(1, rest.place.order, i) for i in range(rest.samples)]
            commit(buffer, rest, version=2)
    buffer.max_staleness = 1
    assert [chunk.place for chunk in buffer.trim(8)] == [Place(0), Place(0, (1,)), Place(2), Place(2, (1,))]
    assert buffer.lease(8, 2).experiences == ["ref1", "ref3"]


def test_the_samples_of_a_phase_follow_from_the_chunks_in_it():
    buffer = make()
    first, _ = split_in_two(buffer)
    buffer.enter(first, Phase.GENERATE, now=1.5)
    assert (buffer.samples_in(Phase.GENERATE), buffer.samples_in(Phase.ADMITTED), buffer.running) == (3, 1, 4)
    assert (first.phase, first.since) == (Phase.GENERATE, 1.5)
    commit(buffer, first)
    assert (buffer.samples_in(Phase.GENERATE), buffer.running) == (0, 1)
    with pytest.raises(BufferError, match="no such open reservation"):
        buffer.enter(first, Phase.SCORE, now=2.0)


@pytest.mark.parametrize(("eta", "runs"), [(0, 40), (1, 40), (2, 500), (4, 500)])
def test_batches_never_run_out_of_chunks_that_add_up_however_chunks_lose_samples(eta, runs):
    """Chunks of eight samples lose two, four or six of them, and what replaces these takes long; batches of sixteen."""
    rule = AdmissionRule(batch=16, max_staleness=eta, concurrency=10**6)
    rows = count()
    for seed in range(runs):
        random, version = Random(seed), 0
        late, losing = random.choice((0.7, 0.9, 0.95)), random.choice((0.3, 0.6))
        buffer = make(capacity=16 * (eta + 1), eta=eta)
        while version < 30:
            while rule.allowance(version, buffer.accepted, buffer.running, generating=0) >= 8:
                chunk = buffer.reserve(8, version)
                chunk.keys = [SampleKey(0, next(rows), 0) for _ in range(8)]
            if chunks := buffer.under_way():
                chunk = random.choice(chunks[-3:] if random.random() < late else chunks)  # the oldest are late
                if random.random() < losing and chunk.samples > 2:
                    rest = buffer.split(chunk, chunk.keys[:random.randrange(2, chunk.samples, 2)])
                    rest.keys = [SampleKey(0, next(rows), 0) for _ in range(rest.samples)]
                assert commit(buffer, chunk, version=chunk.version) is CommitOutcome.READY
            if (lease := buffer.lease(16, version)) is not None:
                buffer.ack(lease, version)
                version += 1
                assert buffer.evict(version) == [], "everything is trained in time"
            else:
                assert buffer.under_way(), f"run {seed} waits, and nothing is under way at version {version}"
