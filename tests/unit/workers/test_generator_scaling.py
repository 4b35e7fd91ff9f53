"""Generators that come and go while others work: stand-ins in virtual time. (Real ones: tests/cluster/test_scaling.)"""

import asyncio
import json
from collections import defaultdict

import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import ClusterError, ConfigError, ModelError
from rlhf_ray.workers.generator_scaling import Scaling
from tests.unit.coordinator.losses import LossyGenerators, PublishingHarness, ReplacementHarness, lost


class Growing(LossyGenerators):
    """Generators whose number changes; `room` is how many the cluster can hold, `slow` how long each rank takes for its
    samples, in seconds, and `slow_starts` to start."""

    def __init__(self, workers=2, room=4, unstartable=(), slow=(), slow_starts=(), **more):
        super().__init__(workers=workers, **more)
        self.slow_starts = dict(slow_starts)
        self.present, self.room, self.unstartable, self.slow = list(range(workers)), room, unstartable, dict(slow)
        self.incarnations, self.versions = defaultdict(lambda: 1), defaultdict(int)
        self.gone = {}
        self.still_open = {}
        self.waits = []

    def __len__(self):
        return len(self.present)

    @property
    def ranks(self):
        return list(self.present)

    async def behave(self, rank, method, *args):
        if method == "generate":
            await asyncio.sleep(self.slow.get(rank, 0.0))
            if rank in self.gone:
                raise lost(self, rank, kind="stale")
        if method == "open_requests":
            self.waits.append(args[0])
            return self.still_open.get(rank, "")
        return await super().behave(rank, method, *args)

    async def add(self, timeout_s):
        if len(self.present) == self.room:
            raise ClusterError("pools.default is full")
        rank = max([*self.present, *self.gone]) + 1
        self.present.append(rank)
        return rank

    async def start_one(self, rank, timeout_s):
        if rank in self.unstartable:
            raise ModelError(f"generator/{rank} finds no model")
        await asyncio.sleep(self.slow_starts.get(rank, 0.0))
        await super().start_one(rank, timeout_s)

    async def remove(self, rank, reason, shutdown=None, grace_s=0.0):
        self.present.remove(rank)
        self.gone[rank] = reason


class Scaled(PublishingHarness):
    """A group whose number of generators changes."""

    def __init__(self, path=None, **growing):
        self.numbers = []
        super().__init__()
        self.group.__class__ = Growing
        Growing.__init__(self.group, **growing)
        self.dispatcher.scheduler.__init__(self.group)
        self.scaling = Scaling(ClusterConfig(heartbeat_timeout_s=30), self.roles, self.sync, self._possible,
                               self.numbers.append,
                               self.said.append)

    @staticmethod
    def _possible(number):
        if number > 6:
            raise ConfigError(f"weights do not reach {number}")

    async def to(self, number):
        return await self.scaling.asked({"generators": number})


def test_one_that_is_new_has_the_present_weights_before_it_is_given_work():
    it = Scaled()

    async def run():
        await it.publish(1, 2)
        adding = asyncio.create_task(it.to(3))
        async with it.sync.changing():  # an update is under way while it starts
            await asyncio.sleep(20)
            assert it.dispatcher.scheduler.up == [0, 1] and not adding.done()
            await it.sync.publish(3)
        answer = await adding
        return answer, await it.ask_all(3), dict(it.group.versions)

    answer, asked, versions = run_in_virtual_time(run())
    assert answer == {"generators": [0, 1, 2], "message": "generators: 2 before, 3 now"}
    assert asked == [0, 1, 2] and versions == {0: 3, 1: 3, 2: 3} and it.numbers == [3]


def test_a_number_that_the_run_cannot_have_is_refused_before_anything_is_started():
    it = Scaled(room=9)

    async def run():
        with pytest.raises(ConfigError, match="weights do not reach 7"):
            await it.to(7)

    run_in_virtual_time(run())
    assert it.group.present == [0, 1] and it.numbers == it.said == []


def test_one_that_goes_finishes_what_it_has_and_is_given_nothing_new():
    it = Scaled(workers=3, slow={2: 10.0})

    async def run():
        first = asyncio.create_task(it.ask_all(3))
        await asyncio.sleep(1)
        removing = asyncio.create_task(it.to(2))
        await asyncio.sleep(1)
        later = await it.ask_all(6)
        assert not removing.done() and 2 in it.group.present
        return await first, later, await removing

    first, later, answer = run_in_virtual_time(run())
    assert first == [0, 1, 2] and later == [0, 0, 0, 1, 1, 1]
    assert answer["generators"] == [0, 1] and list(it.group.gone) == [2] and it.numbers == [2]
    assert it.said[-1] == "generator/2 removed"


def test_the_engine_of_one_that_goes_is_asked_for_open_requests_after_the_driver_s_own_calls():
    it = Scaled(workers=3, slow={2: 10.0})
    it.group.still_open = {2: "1 request for 30.0 s (seed 7)"}

    async def run():
        first = asyncio.create_task(it.ask_all(3))
        await asyncio.sleep(1)
        await it.to(2)
        await first

    run_in_virtual_time(run())
    [waits] = it.group.waits
    assert 20 < waits < 22, "what is left of 30 s after the call of 10 s, which began 1 s before"
    assert it.said[1:] == [
        "generator/2 is removed with open requests, which others get again: 1 request for 30.0 s (seed 7)",
        "generator/2 removed"]


def test_what_it_does_not_finish_within_a_lease_is_made_again_by_others(tmp_path):
    it = Scaled(tmp_path / "faults.jsonl", slow={1: 100.0})

    async def run():
        first = asyncio.create_task(it.ask_all(2))
        await asyncio.sleep(1)
        await it.to(1)
        return await first

    assert run_in_virtual_time(run()) == [0, 0]
    assert it.said[-1] == "generator/1 removed; 4 samples are generated again by others"
    assert it.health.down == {} and it.group.incarnations[1] == 1, "nobody brings it back"


def test_one_that_is_down_goes_first_and_is_not_brought_back(tmp_path):
    it = Scaled(workers=3, doomed=[(0, "generate")])

    async def run():
        it.group.respawn = lambda rank, reason: asyncio.sleep(1e5)  # its node does not come back
        assert sorted(await it.ask_all(3)) == [1, 1, 2]
        assert list(it.health.down) == [("generator", 0)]
        answer = await it.to(2)
        await asyncio.sleep(1)
        return answer

    assert run_in_virtual_time(run())["generators"] == [1, 2]
    assert it.health.down == {} and it.dispatcher.scheduler.up == [1, 2]


@pytest.mark.parametrize("growing, error", [
    ({"room": 3}, "pools.default is full"), ({"unstartable": (3,)}, "no model"),
])
def test_where_not_all_can_be_added_none_is_and_the_run_goes_on(growing, error):
    it = Scaled(**growing)

    async def run():
        await it.publish(1)
        with pytest.raises((ClusterError, ModelError), match=error):
            await it.to(4)
        await it.publish(2)
        return await it.ask_all(4)

    assert run_in_virtual_time(run()) == [0, 0, 1, 1]
    assert it.group.present == [0, 1] and it.numbers == [] and it.dispatcher.scheduler.up == [0, 1]


def test_one_that_is_new_and_lost_while_another_still_starts_is_brought_back():
    it = Scaled(doomed=[(2, "generate")], slow_starts={3: 60.0})

    async def run():
        adding = asyncio.create_task(it.to(4))
        await asyncio.sleep(5)
        assert it.dispatcher.scheduler.up == [0, 1, 2]
        await it.ask_all(3)
        await asyncio.sleep(10)
        assert not adding.done() and it.dispatcher.scheduler.up == [0, 1, 2]
        brought_back = it.group.incarnations[2]
        await adding
        return brought_back

    assert run_in_virtual_time(run()) == 2
    assert it.dispatcher.scheduler.up == [0, 1, 2, 3]


def test_one_that_goes_while_weights_are_published_goes_when_it_has_them():
    """A broadcast has no way to leave it: who is gone in the middle would take the others, and the learner, along."""
    it = Scaled(workers=3)

    async def run():
        publishing = asyncio.create_task(it.publish(1))
        await asyncio.sleep(1)
        assert it.group.begun, "it is under way"
        removing = asyncio.create_task(it.to(2))
        await asyncio.sleep(0.5)
        assert not publishing.done() and not it.group.gone and it.dispatcher.scheduler.up == [0, 1]
        await asyncio.gather(publishing, removing)

    run_in_virtual_time(run())
    assert list(it.group.gone) == [2] and dict(it.group.versions) == {0: 1, 1: 1, 2: 1}


def test_requests_are_done_one_after_the_other():
    it = Scaled()

    async def run():
        return await asyncio.gather(it.to(4), it.to(1), it.to(2))

    answers = run_in_virtual_time(run())
    assert [len(answer["generators"]) for answer in answers] == [4, 1, 2] and it.numbers == [4, 1, 2]


@pytest.mark.parametrize("number", [0, -1, 1.5, None, "two"])
def test_a_number_that_makes_no_sense_is_refused(number):
    with pytest.raises(ConfigError, match="at least one generator"):
        asyncio.run(Scaled().to(number))


def test_faults_know_of_one_that_was_removed_before_it_was_back(tmp_path):
    it = ReplacementHarness(tmp_path / "faults.jsonl", doomed=[(0, "generate")])

    async def run():
        await it.ask_all(1)
        with it.health.set_aside("generator", [0]):
            await asyncio.sleep(10)

    run_in_virtual_time(run())
    (event,) = (json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines())
    assert event["outcome"] == "it was removed before its restart was complete" and event["recovery_s"] is None
