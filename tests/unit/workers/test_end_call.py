"""A caller that is cancelled ends its call at the worker: what the worker does, what callers wait for, and for how
long."""

import asyncio
from types import SimpleNamespace

import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import WorkerError
from rlhf_ray.workers import actor_class as module
from rlhf_ray.workers import calls
from rlhf_ray.workers.actor_class import EndableCalls
from rlhf_ray.workers.calls import Caller, CallSpec, Deadline, Fence, WorkerHandle
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import HealthMonitor
from rlhf_ray.workers.peers import PeerGroup
from tests.unit.coordinator.stand_ins import StandInGroup
from tests.unit.workers.local_actors import process_of
from tests.unit.workers.test_peers import Actor, Generator, Plain, begun, table

RUNNER = Caller("runner", 4, 1)
SOON = Deadline(50.0)


class Tidy:
    """A role whose call takes a while to end."""

    def __init__(self):
        self.log = []

    async def work(self, name):
        """Works until it is cancelled, then tidies up."""
        self.log.append(f"{name} begins")
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.02)
            self.log.append(f"{name} has tidied up")


def spec(method, *args, caller=None, call_id=""):
    return CallSpec.of(method, 1, args, None, caller, call_id)[0]


@pytest.mark.parametrize("caller", [None, RUNNER])
def test_end_call_returns_when_the_call_has_ended_and_others_go_on(caller):
    async def run():
        worker = process_of(Tidy)
        tasks = [asyncio.create_task(worker.timed_call(spec("work", name, caller=caller, call_id=name)))
                 for name in ("a", "b")]
        await asyncio.sleep(0.01)
        ending = asyncio.create_task(worker.timed_call(spec("end_call", "a", caller=caller)))
        await asyncio.sleep(0.005)
        await worker.timed_call(spec("end_call", "a", caller=caller))  # does not interrupt what it does to end
        await ending
        log = list(worker.log)
        with pytest.raises(WorkerError, match="a call of work ended because its caller was cancelled"):
            await tasks[0]
        assert not tasks[1].done()
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        return log

    assert asyncio.run(run()) == ["a begins", "b begins", "a has tidied up"]


def test_a_call_that_arrives_after_it_was_to_end_is_refused_and_the_oldest_ids_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MOST_CALLS", 2)

    async def run():
        worker = process_of(Tidy)
        for call_id in ("a", "b", "c"):
            await worker.timed_call(spec("end_call", call_id))
        for call_id in ("b", "c"):
            with pytest.raises(WorkerError, match="a call of work arrived after its caller was cancelled"):
                await worker.timed_call(spec("work", "x", call_id=call_id))
        assert worker.log == []
        task = asyncio.create_task(worker.timed_call(spec("work", "x", call_id="a")))
        await asyncio.sleep(0.01)
        assert worker.log == ["x begins"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_call_that_is_cancelled_by_others_stays_cancelled():
    async def run():
        endable = EndableCalls()

        async def call():
            with endable.around("a", "work"):
                await asyncio.sleep(1000)

        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


def test_a_worker_with_plain_methods_does_not_offer_it():
    """It would answer `end_call` after the call."""
    worker = process_of(Plain)
    with pytest.raises(TypeError, match="Plain.double cannot end with its caller: Plain has no asynchronous method"):
        worker.timed_call(spec("double", 2, call_id="a"))


def test_only_a_call_that_ends_with_its_caller_has_an_id_and_no_two_have_the_same():
    async def run():
        actors = [Actor("a"), Actor("b")]
        handles = [WorkerHandle("generator", 0, actor, Fence()) for actor in actors]
        for handle in handles:
            for _ in range(100):
                handle.call(Generator.sample, 1, deadline=SOON, ends_with_caller=True)
        handles[0].call(Generator.sample, 2, deadline=SOON)
        return [call.call_id for actor in actors for call in actor.calls]

    ids = asyncio.run(run())
    assert ids.count("") == 1 and len(set(ids)) == 201


@pytest.fixture
def two():
    """A group of two peers, and their actors."""
    group, actors = PeerGroup("generator", SOON, Deadline(7.0)), [Actor("a"), Actor("b")]
    group.update(table(1, {rank: (1, actor, None) for rank, actor in enumerate(actors)}))
    return group, actors


def ends(actor):
    """Ids of the calls that a peer was told to end."""
    return [call.seed for call in actor.calls if call.method == "end_call"]


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_cancelled_call_ends_at_the_peer_that_has_it_however_busy_that_is(two):
    group, (a, b) = two

    async def run():
        [ours] = await begun(group, 1, work=4, sticky="episode")
        [other] = await begun(group, 2, work=1)
        await begun(group, 3, work=9)  # b has more work than a from now on
        ours.cancel()
        await turns()
        assert ends(a) == [a.calls[0].call_id] and ends(b) == []
        ours.cancel()  # once more, by another deadline
        await turns()
        assert not ours.done() and len(ends(a)) == 1, "until the peer has confirmed it, the call is under way"
        assert [call.rank for call in (await group.report(0.0)).under_way] == [0, 1, 1]
        a.answer_all()
        b.answer_all()
        with pytest.raises(asyncio.CancelledError):
            await ours
        await other

    asyncio.run(run())


def test_a_cancelled_call_to_a_peer_that_is_lost_meanwhile_ends_as_cancelled(two):
    group, (a, _) = two

    async def run():
        [ours] = await begun(group, 1)
        ours.cancel()
        await turns()
        a.die()
        with pytest.raises(asyncio.CancelledError):
            await ours
        return await group.report(0.0)

    [(loss, _)] = asyncio.run(run()).losses
    assert (loss.rank, loss.kind) == (0, "died")


def test_a_peer_that_does_not_end_a_call_in_time_is_lost_and_holds_nobody(two, monkeypatch):
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))
    group, _ = two

    async def run():
        [ours] = await begun(group, 1)
        began = asyncio.get_running_loop().time()
        ours.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ours
        return asyncio.get_running_loop().time() - began, await group.report(0.0)

    waited_s, report = run_in_virtual_time(run())
    assert waited_s == pytest.approx(7.0)
    assert [(loss.rank, loss.kind, loss.method) for loss, _ in report.losses] == [(0, "hung", "end_call")]


def test_a_cancelled_call_to_a_peer_that_was_given_up_is_over(two):
    group, (a, b) = two

    async def run():
        [ours] = await begun(group, 1)
        ours.cancel()
        group.update(table(2, {0: (1, None, "it was stopped"), 1: (1, b, None)}))
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(ours, 5)

    asyncio.run(run())
    assert ends(a) == []


class Worker:
    """One worker of a dispatcher; its call goes on until it is ended, and `tidy_s` seconds more."""

    def __init__(self, tidy_s, heartbeat_timeout_s=30.0):
        self.tidy_s, self.open = tidy_s, 0
        self.group = StandInGroup("episode_runner", self.answer)
        self.health = HealthMonitor(ClusterConfig(heartbeat_timeout_s=heartbeat_timeout_s))
        self.dispatcher = WorkerDispatcher(self.group, self.health)
        self.health.register(self.dispatcher.scheduler)

    async def answer(self, rank, method, *args):
        self.open += 1
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(self.tidy_s)
            self.open -= 1

    async def cancelled_after(self, ends_with_caller):
        """Cancel an attempt; returns the seconds that it then takes, and the open calls at the worker."""
        attempt = asyncio.create_task(self.dispatcher.attempt(Generator.sample, 1, ends_with_caller=ends_with_caller))
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        return asyncio.get_running_loop().time() - began, self.open


@pytest.mark.parametrize("asked, tidy_s, seconds, still_open", [
    (True, 4.0, 4.0, 0), (True, 100.0, 30.0, 1), (False, 4.0, 0.0, 1)])
def test_the_driver_waits_for_the_end_of_a_call_at_most_for_the_heartbeat_timeout(asked, tidy_s, seconds, still_open):
    worker = Worker(tidy_s)
    found = run_in_virtual_time(worker.cancelled_after(asked))
    assert found == (pytest.approx(seconds), still_open)
    assert worker.health.down == {}, "detectors find out whether the runner hangs, or what it waits for"
    assert worker.dispatcher.scheduler.load(0) == 0
