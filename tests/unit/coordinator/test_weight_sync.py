"""A publication: begin, every bucket, finish; confirmed by all, or it failed."""

import asyncio

import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.config.generation import BUCKETS_IN_STORE, WeightsConfig
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.errors import DamagedBucket, WeightsError, WorkerError, WorkerLost
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.records import PublicationSize, WeightsConfirmed, WeightsPlan
from tests.unit.coordinator.losses import PublishingHarness
from tests.unit.coordinator.stand_ins import StandInGroup, role_groups_of


class Publication:
    """Stand-ins of a policy with `buckets` buckets on two ranks and of two generators; `events` in their order."""

    def __init__(self, buckets=5, changing=None, confirm=lambda rank, version: version, refuse=None, lacks=(), lost=()):
        """Ranks and versions for which a generator refuses what leaves tensors out (`lacks`), or is given digests of it
        that are lost (`lost`)."""
        self.buckets, self._confirm, self.refuse, self.lacks = buckets, confirm, refuse, set(lacks)
        self.lost = set(lost)
        self.changing = buckets if changing is None else changing
        self.events, self.gathered, self.loaded, self.most_ahead = [], 0, 0, 0
        self.policy = StandInGroup("policy", self._policy, workers=2)
        self.generators = StandInGroup("generators", self._generator, workers=2)
        self.sync = WeightSync(WeightsConfig(bucket_mb=3),
                               role_groups_of(policy=self.policy, generators=self.generators))

    async def _policy(self, rank, method, *args):
        if method == "plan_weights":
            self.events.append(("plan", *args))
            return WeightsPlan(PublicationSize(self.buckets, 100 * self.buckets),
                               PublicationSize(self.changing, 100 * self.changing))
        if method == "unchanged_weights":
            return {"frozen": "digest"}
        assert method == "weight_bucket"
        self.gathered += rank == 0
        self.most_ahead = max(self.most_ahead, self.gathered - self.loaded // 2)
        await asyncio.sleep(0.001)
        return args[:2] if rank == 0 else None

    async def _generator(self, rank, method, *args):
        if method == "fused_groups":
            return [["q", "k"]]
        if method == "begin_weights":
            self.publication, *args = args
        elif method == "load_weights":
            bucket, publication = args
            assert publication == self.publication, "named as it was announced"
            args = [bucket]
        self.events.append((method, rank, *args))
        await asyncio.sleep(0.002 * rank)
        if method == "begin_weights" and len(args) > 3 and (rank, args[0]) in self.lacks:
            raise WeightsError("does not have what is left out")
        if method == "begin_weights" and len(args) > 3 and (rank, args[0]) in self.lost:
            error = WorkerLost("an argument of begin_weights was lost")
            error.role, error.rank, error.kind = "generators", rank, "result"
            raise error
        if method == "load_weights":
            if (rank, args[0][1]) == self.refuse:
                raise WeightsError("bucket 1 is damaged")
            self.loaded += 1
        self.events.append((f"{method} done", rank, *args))
        return WeightsConfirmed(self._confirm(rank, args[0]), 0.1 + rank) if method == "finish_weights" else None

    def begun(self):
        """What each generator was told to expect."""
        return [event[1:] for event in self.events if event[0] == "begin_weights"]

    def publish(self, *versions):
        """Publish one version after the other."""
        async def each():
            return [await self.sync.publish(version) for version in versions]

        return asyncio.run(each())


def test_every_generator_begins_loads_every_bucket_in_order_and_finishes():
    it = Publication()
    (published,) = it.publish(7)
    assert published.seconds > 0 and published.nbytes == 500
    assert published.pause_seconds == 1.1, "the longest of all"
    for rank in (0, 1):
        mine = [event for event in it.events if event[1] == rank and not event[0].endswith("done")]
        assert mine == [("begin_weights", rank, 7, 5, False), *(("load_weights", rank, (7, i)) for i in range(5)),
                        ("finish_weights", rank, 7)]


def test_nothing_is_loaded_before_all_began_and_nothing_finished_before_all_is_loaded():
    it = Publication()
    asyncio.run(it.sync.publish(1))
    names = [event[0] for event in it.events]
    assert names.index("load_weights") > max(i for i, n in enumerate(names) if n == "begin_weights done")
    assert names.index("finish_weights") > max(i for i, n in enumerate(names) if n == "load_weights done")


def test_all_policy_ranks_join_in_gathering():
    it = Publication(buckets=2)
    asyncio.run(it.sync.publish(1))
    assert it.policy.log == [("plan_weights", 0), ("plan_weights", 1), *[("weight_bucket", r) for r in (0, 1)] * 2]


def test_only_some_buckets_are_on_their_way_at_a_time():
    it = Publication(buckets=9)
    asyncio.run(it.sync.publish(1))
    assert it.gathered == 9 and it.most_ahead == BUCKETS_IN_STORE


def test_buckets_are_planned_once_with_the_configured_size_and_what_goes_together():
    it = Publication()
    it.publish(1, 2)
    assert [e for e in it.events if e[0] == "plan"] == [("plan", 3 * 2**20, [["q", "k"]])] * 2  # once on each rank
    assert it.begun() == [(0, 1, 5, False), (1, 1, 5, False), (0, 2, 5, False), (1, 2, 5, False)]


def test_what_does_not_change_is_sent_once():
    it = Publication(buckets=5, changing=2)
    sizes = [published.nbytes for published in it.publish(1, 2, 3)]
    assert sizes == [500, 200, 200] and it.gathered == 9
    assert [args for rank, *args in it.begun() if rank == 0] == [
        [1, 5, False], [2, 2, False, {"frozen": "digest"}], [3, 2, False, {"frozen": "digest"}]]


def test_a_generator_that_lacks_what_is_left_out_is_sent_everything():
    it = Publication(buckets=5, changing=2, lacks=[(1, 2)])
    assert [published.nbytes for published in it.publish(1, 2, 3)] == [500, 500, 200]
    assert [args for rank, *args in it.begun() if rank == 1] == [
        [1, 5, False], [2, 2, False, {"frozen": "digest"}], [2, 5, False], [3, 2, False, {"frozen": "digest"}]]


def test_everything_is_sent_when_what_may_stay_out_is_not_known_any_more():
    it = Publication(buckets=5, changing=2, lost=[(1, 2)])
    assert [published.nbytes for published in it.publish(1, 2, 3)] == [500, 500, 200]


def test_after_a_failed_publication_everything_is_sent():
    it = Publication(buckets=5, changing=2)

    async def with_a_failure():
        await it.sync.publish(1)
        it.refuse = (0, 1)
        with pytest.raises(WeightsError):
            await it.sync.publish(2)
        it.refuse = None
        return await it.sync.publish(3)

    assert asyncio.run(with_a_failure()).nbytes == 500


def test_a_version_sent_again_is_announced_so_and_whole():
    it = Publication(buckets=5, changing=2)

    async def back_at_a_checkpoint():
        await it.sync.publish(1)
        return await it.sync.publish(0, resend=True)

    assert asyncio.run(back_at_a_checkpoint()).nbytes == 500
    assert [args for rank, *args in it.begun() if rank == 1] == [[1, 5, False], [0, 5, True]]


def test_a_generator_that_confirms_another_version_fails_the_publication():
    it = Publication(confirm=lambda rank, version: version - rank)
    with pytest.raises(WeightsError, match=r"published version 7, but the generators confirmed \[7, 6\]"):
        asyncio.run(it.sync.publish(7))


class WithDamage(PublishingHarness):
    """Generators for which buckets are damaged: `damaged` has how many times, by (rank, incarnation, bucket)."""

    def __init__(self, path, damaged, **options):
        super().__init__(path=path, workers=2, **options)
        self.damaged, self.loaded, behave = dict(damaged), [], self.group.behave

        async def generator(rank, method, *args):
            if method == "load_weights":
                place = rank, self.group.incarnation(rank), args[0][1]
                if self.damaged.get(place, 0):
                    self.damaged[place] -= 1
                    raise DamagedBucket(f"bucket {args[0][1]} has digest 1, expected 2")
                self.loaded.append(place)
            return await behave(rank, method, *args)

        self.group.answer = generator

    async def learner(self, rank, method, *args):
        return args[:2] if method == "weight_bucket" else await super().learner(rank, method, *args)


def test_a_damaged_bucket_is_sent_again_to_that_generator_alone(tmp_path):
    it = WithDamage(tmp_path / "faults.jsonl", {(1, 1, 3): 1})
    run_in_virtual_time(it.publish(7))
    assert it.group.versions == [7, 7] and it.group.incarnations == [1, 1]
    assert len(it.loaded) == len(set(it.loaded)) == 80
    assert it.policy.log.count(("weight_bucket", 0)) == 41
    (event,) = read_faults(tmp_path / "faults.jsonl")
    assert [event[key] for key in ("role", "rank", "kind", "outcome")] == [
        "generator", 1, "damaged", "sent again, intact"] and event["recovery_s"] > 0
    assert "generator/1 got a damaged bucket of weights; it was sent again (bucket 3 has digest" in it.said[0]
    assert it.health.log.take()["faults/damaged_buckets"] == 1


def test_a_generator_whose_bucket_is_damaged_twice_is_replaced_and_the_others_go_on(tmp_path):
    it = WithDamage(tmp_path / "faults.jsonl", {(1, 1, 3): 2, (1, 2, 5): 1})

    async def run():
        await it.publish(7)
        versions = list(it.group.versions)
        await asyncio.sleep(30)
        return versions

    assert run_in_virtual_time(run()) == [7, 0]
    assert it.group.versions == [7, 7] and it.group.incarnations == [1, 2]
    events = [(event["kind"], event["outcome"]) for event in read_faults(tmp_path / "faults.jsonl")]
    assert events == [("damaged", "sent again, not intact"), ("damaged", "sent again, intact"),
                      ("broke", "caught up to version 7")]
    assert "did not get bucket 3 of weights version 7 intact in two attempts" in it.said[1]


def test_a_refused_bucket_fails_the_publication_before_it_is_finished():
    it = Publication(refuse=(1, 3))
    with pytest.raises(WeightsError, match="bucket 1 is damaged"):
        asyncio.run(it.sync.publish(7))
    assert not any(event[0] == "finish_weights" for event in it.events)


class TestOpenRequests:
    """With max_staleness 0 nothing may be in flight when weights change."""

    @staticmethod
    def sync(still_open=None, idle_within_s=30.0, doomed=()):
        """(weight sync, its harness, and the ranks that were asked with the seconds that they may wait)."""
        it, asked = PublishingHarness(doomed=doomed), []
        behave = it.group.behave

        async def answer(rank, method, *args):
            answered = await behave(rank, method, *args)
            if method != "open_requests":
                return answered
            asked.append((rank, *args))
            return (still_open or {}).get(rank, "")

        it.group.answer = answer
        return WeightSync(WeightsConfig(), it.roles, idle_within_s=idle_within_s), it, asked

    def test_generators_are_asked_and_may_go_on_when_they_have_none(self):
        sync, _, asked = self.sync()
        run_in_virtual_time(sync.require_idle())
        assert asked == [(0, 30.0), (1, 30.0)]

    def test_their_time_is_not_that_of_a_publication(self):
        sync, it, _ = self.sync()
        behave, phases = it.group.answer, {}

        async def answer(rank, method, *args):
            await asyncio.sleep(0.01)
            phases.setdefault(method, set()).update(task.phase for task in it.health.clock.under_way)
            return await behave(rank, method, *args)

        async def run():
            it.group.answer = answer
            await sync.require_idle()
            async with sync.changing():
                await sync.publish(1)

        run_in_virtual_time(run())
        assert phases["open_requests"] == {"end_requests"} and "publish" in phases["finish_weights"]

    def test_requests_that_stay_open_are_an_error_that_names_them(self):
        sync, _, _ = self.sync({1: "2 requests for 31.0 s (seed 5, 6)"})
        with pytest.raises(WorkerError, match=r"max_staleness=0 .* generator/1: 2 requests for 31.0 s \(seed 5, 6\)"
                           ) as found:
            run_in_virtual_time(sync.require_idle())
        assert found.value.role == "generator", "the run is saved: it is not a learner's loss"

    def test_a_generator_that_is_lost_meanwhile_is_replaced_and_has_none(self):
        sync, it, asked = self.sync(doomed=[(0, "open_requests")])

        async def run():
            await sync.require_idle()
            return list(it.health.down)

        assert run_in_virtual_time(run()) == [("generator", 0)]
        assert asked == [(1, 30.0)]

    def test_responses_may_be_in_flight_with_another_bound(self):
        sync, _, asked = self.sync({1: "2 requests"}, idle_within_s=None)
        run_in_virtual_time(sync.require_idle())
        assert asked == []

    @pytest.mark.parametrize("resend", [True, False])
    def test_weights_that_are_sent_again_outside_a_step_wait_for_them_too(self, resend):
        sync, it, asked = self.sync()

        async def run():
            async with sync.changing():
                await sync.publish(3, resend=resend)

        run_in_virtual_time(run())
        assert len(asked) == 2 * resend and it.group.versions == [3, 3]
