"""Calls from a worker to its peers: which peer gets a call, what a table of the coordinator changes, what is refused at
either end, and what the driver is told. Actors are stand-ins; processes: tests/cluster/test_peer_calls.py."""

import asyncio
import inspect
import pickle
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import ConfigError, ModelError, WorkerError, WorkerLost
from rlhf_ray.observability.spans import StepClock
from rlhf_ray.workers import peers as peers_module
from rlhf_ray.workers.actor_class import CallerFence, Process
from rlhf_ray.workers.calls import Caller, CallSpec, Deadline
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import HealthMonitor
from rlhf_ray.workers.peer_tables import PeerTables
from rlhf_ray.workers.peers import Peer, PeerCall, PeerGroup, PeerReport, PeerTable
from tests.unit.workers.local_actors import process_of
from tests.unit.workers.local_groups import local_group

RUNNER = Caller("runner", 4, 1)
SOON = Deadline(50.0)


class Generator:
    """A role."""

    async def sample(self, seed):
        """Its method."""


class Actor:
    """A process of a peer: each call waits until the test answers it."""

    def __init__(self, name):
        self.name, self.calls = name, []
        self.timed_call = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._remote))

    def _remote(self, spec, *_):
        call = CallSpec(*spec)
        answer = asyncio.get_running_loop().create_future()
        self.calls.append(SimpleNamespace(seed=call.plain[0], caller=call.caller, answer=answer, method=call.method,
                                          call_id=call.call_id))
        return answer, answer

    @property
    def seeds(self):
        return [call.seed for call in self.calls]

    def answer_all(self):
        """With its name and the call's seed."""
        for call in self.calls:
            if not call.answer.done():
                call.answer.set_result((self.name, call.seed))

    def die(self):
        for call in self.calls:
            if not call.answer.done():
                call.answer.set_exception(ActorDiedError())


def table(number, peers, error=None):
    """A table of these peers by rank: (incarnation, actor or None, reason or None)."""
    return PeerTable(number, RUNNER, {rank: Peer(incarnation, reason, actor)
                                      for rank, (incarnation, actor, reason) in peers.items()}, error)


@pytest.fixture
def two():
    """A group of two peers, and their actors."""
    group, actors = PeerGroup("generator", SOON, SOON), [Actor("a"), Actor("b")]
    group.update(table(1, {rank: (1, actor, None) for rank, actor in enumerate(actors)}))
    return group, actors


async def begun(group, *seeds, **options):
    """Calls under way, as tasks."""
    tasks = [asyncio.create_task(group.call(Generator.sample, seed, **options)) for seed in seeds]
    await asyncio.sleep(0)
    return tasks


def test_the_peer_with_the_least_work_gets_a_call_and_every_call_names_its_caller(two):
    group, (a, b) = two

    async def run():
        tasks = await begun(group, 1, work=3) + await begun(group, 2, 3)
        a.answer_all()
        b.answer_all()
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [("a", 1), ("b", 2), ("b", 3)]
    assert {call.caller for call in a.calls + b.calls} == {("runner", 4, 1)}


def test_calls_of_one_key_go_to_one_process_unless_it_is_much_busier(two):
    group, (a, b) = two

    async def run():
        tasks = await begun(group, 1, sticky="episode", work=4) + await begun(group, 2, sticky="other", work=4)
        # With 5 more, the first has 9, which is less than 1.5 times 4 + 5; with 1 more it has 10, and 7.5 is less.
        tasks += await begun(group, 3, sticky="episode", work=5) + await begun(group, 4, sticky="episode", work=1)
        tasks += await begun(group, 5, sticky="episode", work=1)
        a.answer_all()
        b.answer_all()
        await asyncio.gather(*tasks)
        tasks = await begun(group, 6, sticky="other") + await begun(group, 7, sticky="episode")
        a.answer_all()
        b.answer_all()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert a.seeds == [1, 3, 7] and b.seeds == [2, 4, 5, 6]


def test_a_key_follows_no_rank_to_its_successor_whose_cache_is_empty(two):
    group, (a, b) = two
    successor = Actor("a2")

    async def run():
        tasks = await begun(group, 1, sticky="episode")
        a.answer_all()
        await asyncio.gather(*tasks)
        group.update(table(2, {0: (2, successor, None), 1: (1, b, None)}))
        tasks = await begun(group, 2) + await begun(group, 3, 4, sticky="episode")
        successor.answer_all()
        b.answer_all()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert (successor.seeds, b.seeds) == ([2], [3, 4])


def test_the_longest_unused_keys_are_forgotten(two, monkeypatch):
    monkeypatch.setattr(peers_module, "STICKY_KEYS", 2)
    group, (a, _) = two

    async def run():
        for key in ("x", "y", "x", "z"):
            tasks = await begun(group, key, sticky=key)
            a.answer_all()
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert list(group._sticky) == ["x", "z"]


def test_an_answer_that_comes_after_its_peer_was_given_up_is_refused_and_the_call_repeated(two):
    group, (a, b) = two

    async def run():
        tasks = await begun(group, 1)
        a.calls[0].answer.set_result(("a", "late"))
        group.update(table(2, {0: (1, None, "it made no token"), 1: (1, b, None)}))
        await asyncio.sleep(0.01)
        b.answer_all()
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [("b", 1)]


def test_a_peer_that_dies_is_left_at_once_by_all_its_calls_and_told_until_it_has_a_successor(two):
    group, (a, b) = two

    async def run():
        tasks = await begun(group, 1, 2, 3, work=4)
        a.calls[0].answer.set_exception(ActorDiedError())
        reports = [await group.report(20)]
        await asyncio.sleep(0.01)
        assert b.seeds == [2, 1, 3], "the other call to it is repeated too, though nothing answers it"
        reports.append(await group.report(0))
        group.update(table(2, {0: (1, a, None), 1: (1, b, None)}))  # the driver has not yet heard of it
        tasks += await begun(group, 4)
        group.update(table(3, {0: (2, Actor("a2"), None), 1: (1, b, None)}))
        b.answer_all()
        await asyncio.gather(*tasks)
        return reports, await group.report(0)

    (first, second), last = asyncio.run(run())
    [(error, work)] = first.losses
    assert (error.worker, error.incarnation, error.kind, work) == ("generator/0", 1, "died", 4)
    assert [(e.incarnation, work) for e, work in second.losses] == [(1, 4)], "the work of the call that it took along"
    assert last.losses == [] and b.seeds == [2, 1, 3, 4]
    assert [call.rank for call in second.under_way] == [1, 1, 1] and len(last.finished) == 4


def test_a_report_has_calls_under_way_and_those_that_were_answered_since_the_last(two, monkeypatch):
    group, (a, b) = two
    now = 100.0
    monkeypatch.setattr(peers_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def run():
        nonlocal now
        tasks = await begun(group, 1, 2, work=2)
        now += 5
        a.answer_all()
        await asyncio.sleep(0.01)
        now += 1
        reports = [await group.report(0), await group.report(0)]
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.01)
        b.answer_all()  # the call to it, and its end
        await asyncio.gather(*tasks, return_exceptions=True)
        return [*reports, await group.report(0)]

    under_way = PeerCall(1, "sample", 6.0, 2)
    assert asyncio.run(run()) == [
        PeerReport([], [under_way], [PeerCall(0, "sample", 5.0, 2, 1.0)]), PeerReport([], [under_way], []),
        PeerReport([], [], [])]


def test_a_peer_that_gets_no_new_calls_may_finish_those_that_it_has(two):
    group, (a, b) = two

    async def run():
        tasks = await begun(group, 1)
        group.update(table(2, {0: (1, None, None), 1: (1, b, None)}))
        tasks += await begun(group, 2, 3)
        a.answer_all()
        b.answer_all()
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [("a", 1), ("b", 2), ("b", 3)]


def test_a_table_that_is_overtaken_by_a_later_one_changes_nothing(two):
    group, (a, b) = two
    successor = Actor("a2")
    group.update(table(3, {0: (2, successor, None)}))
    group.update(table(2, {0: (1, a, None), 1: (1, b, None)}))

    async def run():
        tasks = await begun(group, 1)
        successor.answer_all()
        return await asyncio.wait_for(asyncio.gather(*tasks), 10)

    assert asyncio.run(run()) == [("a2", 1)] and group.ranks == [0]


def test_a_wait_for_a_peer_has_the_call_s_deadline_and_names_it():
    async def run():
        group = PeerGroup("generator", Deadline(30.0, "cluster.call_timeout_s"), SOON)
        with pytest.raises(WorkerError, match=r"^no generator was available for sample within 30 s "
                                              r"\(cluster.call_timeout_s\)$"):
            await group.call(Generator.sample, 1)
        with pytest.raises(WorkerError, match=r"within 7 s$"):
            await group.call(Generator.sample, 1, deadline=Deadline(7.0))
        late = asyncio.create_task(group.call(Generator.sample, 1))
        await asyncio.sleep(29)
        actor = Actor("a")
        group.update(table(1, {0: (1, actor, None)}))
        await asyncio.sleep(10)
        actor.answer_all()
        return await late

    assert run_in_virtual_time(run()) == ("a", 1)


def test_who_waits_for_a_peer_hears_that_none_will_come():
    async def run():
        group = PeerGroup("generator", SOON, SOON)
        waiting = await begun(group, 1)
        group.update(table(1, {}, ModelError("the model is gone")))
        await asyncio.gather(*waiting)

    with pytest.raises(ModelError, match="the model is gone"):
        asyncio.run(run())


def test_a_caller_that_was_given_up_repeats_nothing(two):
    group, (a, b) = two

    async def run():
        tasks = await begun(group, 1)
        a.calls[0].answer.set_exception(WorkerLost("runner/4 was given up", *RUNNER, "sample", "stale"))
        await asyncio.gather(*tasks)

    with pytest.raises(WorkerLost, match="runner/4 was given up"):
        asyncio.run(run())
    assert b.calls == [] and asyncio.run(group.report(0)).losses == []


def test_an_empty_group_travels_to_the_worker_that_it_is_for():
    group = pickle.loads(pickle.dumps(PeerGroup("generator", SOON, SOON)))
    assert (group.role, group.deadline, group.ranks) == ("generator", SOON, [])


def test_a_loss_travels_with_all_that_the_driver_decides_by():
    error = WorkerLost("no answer", "generator", 3, 2, "sample", "hung", 1.5)
    found = pickle.loads(pickle.dumps(error))
    assert (str(found), vars(found)) == ("no answer", vars(error))


def test_a_caller_s_earlier_process_is_refused_once_a_later_one_is_known():
    fence = CallerFence()
    fence.require(RUNNER, "sample")
    fence.refuse_before(RUNNER._replace(rank=5, incarnation=9))
    fence.require(RUNNER, "sample")
    fence.require(RUNNER._replace(incarnation=3), "sample")
    with pytest.raises(WorkerLost, match=r"runner/4 calls sample from its process 1, which was given up \(the newest "
                                         r"is 3\)") as refused:
        fence.require(RUNNER, "sample")
    assert (refused.value.worker, refused.value.incarnation, refused.value.kind) == ("runner/4", 1, "stale")


class Slow:
    """A role whose calls end when they are cancelled, or never."""

    def __init__(self):
        self.ended = []

    async def wait(self, name):
        """As long as it takes."""
        try:
            await asyncio.sleep(1000)
        finally:
            self.ended.append(name)


class Plain:
    """A role with plain methods."""

    def __init__(self, generators=None):
        self.generators = generators

    def double(self, x):
        """Twice."""
        return 2 * x


def spec(method, *args, caller=None):
    return CallSpec.of(method, 1, args, None, caller)[0]


def test_the_calls_of_a_caller_that_was_given_up_end_at_once_and_others_go_on():
    async def run():
        worker, later = process_of(Slow), RUNNER._replace(incarnation=2)
        tasks = [asyncio.create_task(worker.timed_call(spec("wait", name, caller=caller)))
                 for name, caller in (("old", RUNNER), ("new", later), ("driver's", None))]
        await asyncio.sleep(0.01)
        await worker.timed_call(spec("refuse_callers_before", later))
        with pytest.raises(WorkerLost, match="runner/4 calls wait from its process 1"):
            await asyncio.wait_for(tasks[0], 10)
        ended = list(worker.ended)
        for task in tasks[1:]:
            task.cancel()
        found = await asyncio.gather(*tasks[1:], return_exceptions=True)
        return ended, [type(error) for error in found]

    assert asyncio.run(run()) == (["old"], [asyncio.CancelledError] * 2)


def test_a_role_with_plain_methods_refuses_such_callers_too_and_stays_a_plain_actor():
    worker = process_of(Plain)
    assert worker.timed_call(spec("double", 2, caller=RUNNER))[0] == 4
    worker.timed_call(spec("refuse_callers_before", RUNNER._replace(incarnation=2)))
    with pytest.raises(WorkerLost):
        worker.timed_call(spec("double", 2, caller=RUNNER))
    assert not inspect.getmembers(type(worker), inspect.iscoroutinefunction), "Ray would run it as an asynchronous one"


def test_a_group_among_a_role_s_arguments_gets_the_tables_of_its_role():
    group = PeerGroup("generator", SOON, SOON)
    worker = process_of(Plain, generators=group)
    worker.timed_call(spec("update_peers", "generator", table(1, {2: (1, Actor("c"), None)})))
    assert worker.generators is group and group.ranks == [2]


class Driver:
    """Two generators and two runners, and the tables between them; `sent` has what workers were told: (worker, method,
    arguments)."""

    def __init__(self, monkeypatch, clock=None):
        self.sent, self.reports = [], {}
        self.health = HealthMonitor(ClusterConfig(heartbeat_timeout_s=20.0), clock=clock)

        def group(role, **options):
            made = local_group(monkeypatch, None, role=role, call_timeout_s=50.0, **options)
            made.own_call = lambda rank, method, *args, **_: self._told(made, rank, method, args)
            return made

        self.generators = WorkerDispatcher(group("generator", workers=2), self.health)
        self.runners = WorkerDispatcher(group("runner", workers=2), self.health)
        self.health.register(self.generators.scheduler)
        self.health.register(self.runners.scheduler)
        self.tables = PeerTables(self.runners, self.generators, 20.0)

    def _told(self, group, rank, method, args):
        self.sent.append((f"{group.role}/{rank}", method, args))

        async def answer():
            asked = method is Process.report_peers
            return await self.reports.setdefault(rank, asyncio.Queue()).get() if asked else None

        return SimpleNamespace(done=answer, value=answer)

    def told(self, method):
        """Who was told so by the driver since the last question, with the last argument."""
        found = [(worker, args[-1]) for worker, told, args in self.sent if told is method]
        self.sent = [each for each in self.sent if each[1] is not method]
        return found

    def describe(self, table):
        """Incarnation and whether it gets calls or is given up, by rank."""
        return {rank: (peer.incarnation, "given up" if peer.given_up else "called" if peer.actor else "left out")
                for rank, peer in table.peers.items()}


def test_callers_get_a_table_at_first_and_after_each_change_among_their_peers(monkeypatch):
    async def run():
        it = Driver(monkeypatch)
        await it.tables.send_first()
        told = [it.told(Process.update_peers)]
        group, scheduler = it.generators.group, it.generators.scheduler
        scheduler.leave_out(1)
        group.give_up(1, "it made no token")
        await asyncio.sleep(0)
        told.append(it.told(Process.update_peers))
        await group.respawn(1)
        scheduler.take_back(1)
        await asyncio.sleep(0)
        told.append(it.told(Process.update_peers))
        scheduler.leave_out(0)  # it is about to be removed
        await asyncio.sleep(0)
        told.append(it.told(Process.update_peers))
        scheduler.fail(ModelError("the model is gone"))
        await asyncio.sleep(0)
        return it, told, it.told(Process.update_peers)

    it, told, last = asyncio.run(run())
    assert [[worker for worker, _ in each] for each in told] == [["runner/0", "runner/1"]] * 4
    assert [it.describe(each[0][1]) for each in told] == [
        {0: (1, "called"), 1: (1, "called")}, {0: (1, "called"), 1: (1, "given up")},
        {0: (1, "called"), 1: (2, "called")}, {0: (1, "left out"), 1: (2, "called")}]
    assert told[1][1][1].caller == Caller("runner", 1, 1)
    numbers = [table.number for each in told for _, table in each]
    assert numbers == sorted(set(numbers))
    assert isinstance(last[0][1].error, ModelError)


def test_peers_refuse_a_caller_from_its_loss_on_and_its_successor_has_a_table_before_it_is_back(monkeypatch):
    async def run():
        it, order = Driver(monkeypatch), []
        await it.tables.send_first()
        group, scheduler = it.runners.group, it.runners.scheduler
        scheduler.leave_out(1)
        group.give_up(1, "it was stopped")
        await asyncio.sleep(0)
        refused = it.told(Process.refuse_callers_before)
        await group.respawn(1)
        it.told(Process.update_peers)
        it.generators.scheduler.leave_out(0)
        await asyncio.sleep(0)
        unstarted = it.told(Process.update_peers)
        await it.tables.introduce(1, lambda: order.append(it.told(Process.update_peers)))
        scheduler.take_back(1)
        await asyncio.sleep(0)
        return refused, unstarted, order, it.told(Process.refuse_callers_before)

    refused, unstarted, [[(worker, table)]], again = asyncio.run(run())
    assert refused == [(f"generator/{rank}", Caller("runner", 1, 2)) for rank in (0, 1)] and again == []
    assert [worker for worker, _ in unstarted] == ["runner/0"], "the successor has not started"
    assert worker == "runner/1" and table.caller == Caller("runner", 1, 2)


def test_the_driver_counts_a_caller_s_calls_as_its_own(monkeypatch):
    """Work under way is a peer's load, and looked at; answered calls are a sign of life; a loss is one."""
    async def run():
        now = 1000.0
        it = Driver(monkeypatch, StepClock(lambda: now))
        scheduler, clock = it.generators.scheduler, it.health.clock
        it.generators.group.respawn = lambda *_: asyncio.sleep(1000)
        await it.tables.send_first()
        watching = asyncio.create_task(it.tables.run())
        await asyncio.sleep(0)
        for runner, seconds in ((0, 30.0), (1, 2.0)):
            it.reports.setdefault(runner, asyncio.Queue()).put_nowait(PeerReport(
                [], [PeerCall(1, "sample", seconds, 4)], [PeerCall(0, "sample", 3.0, 4, 1.0)] * 2))
        await asyncio.sleep(0.01)
        found = [[scheduler.load(rank) for rank in (0, 1)], dict(scheduler.finished), it.health.long_calls(),
                 [(group.role, rank) for group, rank in it.health.watched()]]
        spans = [(span.worker, span.start, span.end) for span in clock.work(0, now) if span.end < now]
        loss = WorkerLost("generator/1 died", "generator", 1, 1, "sample", "died")
        it.reports[0].put_nowait(PeerReport([(loss, 4)], [], []))
        await asyncio.sleep(0.01)
        found.append([scheduler.load(rank) for rank in (0, 1)])
        it.runners.group.give_up(1, "it was stopped")
        down = dict(it.health.down)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return found, spans, down, [scheduler.load(rank) for rank in (0, 1)], clock.under_way

    found, spans, down, load, under_way = asyncio.run(run())
    assert found == [[0, 8], {0: 4}, {("generator", 1): (970.0, "sample")}, [("generator", 1)], [0, 4]]
    assert spans == [(0, 996.0, 999.0)] * 4
    assert list(down) == [("generator", 1)] and down["generator", 1].work_again == 4
    assert load == [0, 0] and not under_way, "of callers that are gone nothing is left"


def test_ranks_that_hold_a_model_together_are_nobody_s_peers(monkeypatch):
    health = HealthMonitor()
    scorers, runners = (WorkerDispatcher(local_group(monkeypatch, role=role, workers=2), health)
                        for role in ("reward_scorer", "runner"))
    scorers.group.replica = lambda rank: [0, 1]
    with pytest.raises(ConfigError, match="runner cannot call reward_scorer/0, which holds a model together"):
        PeerTables(runners, scorers, 20.0)
