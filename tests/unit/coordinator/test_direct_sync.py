"""Who takes part in a publication from GPU to GPU. Workers are stand-ins; what they send has tests of its own."""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_ray.coordinator import direct_sync
from rlhf_ray.coordinator.broadcast_group import BroadcastGroup
from rlhf_ray.coordinator.direct_sync import DirectSync
from rlhf_ray.errors import DamagedBucket, WeightsError, WorkerLost
from rlhf_ray.records import PublicationSize, WeightRoute
from rlhf_ray.workers.health_monitor import Decision, HealthMonitor
from tests.unit.coordinator.stand_ins import StandInGroup, role_groups_of


class RetriedLosses(HealthMonitor):
    """Replaces nobody: the calls of lost workers go to others."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def lost(self, error, work=0, silent_s=None):
        self.losses.append(error)
        return Decision.RETRY


class Group(StandInGroup):
    """One whose workers are each their first process."""

    def incarnation(self, rank):
        return 1

    def processes(self, rank):
        return SimpleNamespace(host="10.0.0.1")


def test_a_generator_that_is_lost_before_all_have_met_ends_nothing():
    async def generator(rank, method, *args):
        if method == "devices" and rank == 1:
            raise WorkerLost("generator/1 died in devices", "generator", 1, 1, "devices")
        return 2 if method == "devices" else None

    async def work():
        health = RetriedLosses()
        roles = role_groups_of(health, generators=Group("generator", generator, 3),
                               policy=Group("policy_learner", learner))
        dispatcher = roles.dispatcher(roles.generators)
        receivers = BroadcastGroup(dispatcher, range(3))
        await DirectSync("ipc", roles).connect(receivers)
        return roles.generators.log, [error.rank for error in health.losses], receivers.ranks

    async def learner(rank, method, *args):
        return None

    log, lost, ranks = asyncio.run(work())
    assert [rank for method, rank in log if method == "connect_weights"] == [0, 2]
    assert (lost, ranks) == ([1], [0, 2])


def test_who_has_met_meets_no_more_until_the_learners_are_forgotten():
    """Each meeting has the learner leave the one before (see `Learner.connect_weights`)."""
    async def answer(rank, method, *args):
        return 1

    async def work():
        roles = role_groups_of(generators=Group("generator", answer, 2), policy=Group("policy_learner", answer))
        direct, receivers = DirectSync("ipc", roles), BroadcastGroup(roles.dispatcher(roles.generators), range(2))
        return [await direct.connect(receivers), await direct.connect(receivers), direct.forget(),
                await direct.connect(receivers)], roles.policy.log

    met, log = asyncio.run(work())
    assert met == [True, False, None, True]
    assert [method for method, _ in log] == ["connect_weights"] * 2


class Broadcast:
    """A learner and three generators in a publication of two buckets; `log` keeps what was called."""

    def __init__(self, monkeypatch, generator, send):
        monkeypatch.setattr(direct_sync, "ALONE_S", 0.05)
        self.health = RetriedLosses()
        self._generator, self._send = generator, send
        self.roles = role_groups_of(self.health, generators=Group("generator", self._generators, 3),
                            policy=Group("policy_learner", self._learner))
        self.dispatcher = self.roles.dispatcher(self.roles.generators)
        self.receivers = BroadcastGroup(self.dispatcher, range(3))

    @property
    def lost(self):
        """(rank, error) of each loss."""
        return [(error.rank, str(error)) for error in self.health.losses]

    async def _generators(self, rank, method, *args):
        if method == "load_weights":
            return await self._generator(rank, args[0])
        return 1 if method == "devices" else None

    async def _learner(self, rank, method, *args):
        if method == "send_bucket":
            return await self._send()
        return {"offer_bucket": args[1:2], "broadcast_route": WeightRoute("nccl", 4)}.get(method)

    async def send(self):
        sync = DirectSync("nccl", self.roles)
        await sync.connect(self.receivers)
        await asyncio.wait_for(sync.send(self.receivers, 5, 1, PublicationSize(2, 100), True), 10)

    def called(self, method):
        return [rank for name, rank in self.roles.generators.log if name == method]

    def offers(self):
        return sum(name == "offer_bucket" for name, _ in self.roles.policy.log)


async def for_ever(*_):
    await asyncio.Event().wait()


async def at_once(*_):
    return None


def dies(rank):
    return WorkerLost(f"generator/{rank} died in load_weights", "generator", rank, 1, "load_weights")


async def breaks(*_):
    raise ConnectionError("closed by peer")


@pytest.mark.parametrize("others", [for_ever, at_once])
def test_a_learner_that_waits_for_a_lost_generator_is_given_up_with_the_others_and_told_which(monkeypatch, others):
    async def generator(rank, bucket):
        if rank == 1:
            raise dies(1)
        await others()

    async def work():
        broadcast = Broadcast(monkeypatch, generator, for_ever)
        with pytest.raises(WorkerLost, match=r"bucket 0 of weights version 5, .*: generator/1 died in") as raised:
            await broadcast.send()
        return broadcast, raised.value

    broadcast, error = asyncio.run(work())
    assert (error.role, error.rank, error.kind) == ("policy_learner", 0, "hung")
    assert [rank for rank, _ in broadcast.lost] == [1, 0, 2]
    assert "waits for bucket 0 of weights version 5, which another" in broadcast.lost[1][1]
    assert "generator left: generator/1 died" in broadcast.lost[1][1]


def test_a_learner_that_notices_first_is_blamed_no_more_than_one_that_waits(monkeypatch):
    async def generator(rank, bucket):
        await asyncio.sleep(0.01)
        raise dies(rank)

    with pytest.raises(WorkerLost, match="a generator did not take part: generator/0 died"):
        asyncio.run(Broadcast(monkeypatch, generator, breaks).send())


def test_what_breaks_the_learner_alone_is_raised_as_it_is_and_who_waits_for_it_is_given_up(monkeypatch):
    async def work():
        broadcast = Broadcast(monkeypatch, for_ever, breaks)
        with pytest.raises(ConnectionError):
            await broadcast.send()
        return broadcast.lost

    lost = asyncio.run(work())
    assert [rank for rank, _ in lost] == [0, 1, 2]
    assert "generator/0 waits for bucket 0 of weights version 5, which the learner does not finish" in lost[0][1]


def test_generators_of_a_broadcast_that_is_broken_off_are_given_up(monkeypatch):
    """A catch-up ends like this when the learners are about to be replaced."""
    async def work():
        broadcast = Broadcast(monkeypatch, for_ever, for_ever)
        sending = asyncio.create_task(broadcast.send())
        while not broadcast.called("load_weights"):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return broadcast.lost

    assert [rank for rank, _ in asyncio.run(work())] == [0, 1, 2]


def test_a_generator_that_refuses_its_bucket_leaves_no_learner_waiting(monkeypatch):
    async def generator(rank, bucket):
        if rank == 1:
            raise WeightsError("bucket 0 was not expected")
        await for_ever()

    with pytest.raises(WorkerLost, match="a generator did not take part: bucket 0 was not expected"):
        asyncio.run(Broadcast(monkeypatch, generator, for_ever).send())


def test_a_generator_that_gets_a_damaged_description_is_replaced_and_the_others_get_the_rest(monkeypatch):
    async def generator(rank, bucket):
        if rank == 1 and bucket == (0,):
            raise DamagedBucket("bucket 0: expected checksum 1, found 2")

    async def work():
        broadcast = Broadcast(monkeypatch, generator, at_once)
        await broadcast.send()
        return broadcast.lost, broadcast.called("load_weights"), broadcast.receivers.ranks

    (lost,), loaded, ranks = asyncio.run(work())
    assert lost[0] == 1 and "did not get the description of bucket 0 of weights version 5: bucket 0: exp" in lost[1]
    assert (loaded, ranks) == ([0, 1, 2, 0, 2], [0, 2])


def test_one_that_dies_when_the_bucket_is_sent_leaves_and_the_others_meet_again(monkeypatch):
    async def generator(rank, bucket):
        if rank == 1 and bucket == (0,):
            raise dies(1)

    async def work():
        broadcast = Broadcast(monkeypatch, generator, at_once)
        await broadcast.send()
        return broadcast

    broadcast = asyncio.run(work())
    assert [rank for rank, _ in broadcast.lost] == [1]
    assert broadcast.called("connect_weights") == [0, 1, 2, 0, 2]
    assert broadcast.called("load_weights") == [0, 1, 2, 0, 2]
    assert broadcast.offers() == 3, "the second bucket, which was offered to those who met before, is offered again"
