"""What becomes of a lost worker, and of the calls that it leaves behind. Workers are stand-ins, lost on purpose; real
processes die in tests/cluster/test_worker_losses.py."""

import asyncio
import itertools
import json
from types import SimpleNamespace

import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import ModelError, RewardError, WorkerError, WorkerLost
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.observability.spans import StepClock, Task
from rlhf_ray.records import PublicationSize, WeightsPlan
from rlhf_ray.workers import detectors
from rlhf_ray.workers.detectors import HeartbeatDetector, TokenProgress
from rlhf_ray.workers.dispatcher import retry_on_lost_object
from rlhf_ray.workers.health_monitor import Decision, HealthMonitor
from rlhf_ray.workers.scheduler import LeastLoadedScheduler
from tests.unit.coordinator.losses import LossyGenerators, PublishingHarness, ReplacementHarness, lost
from tests.unit.coordinator.stand_ins import StandInGroup


def test_a_lost_call_is_made_again_at_another_worker_and_the_lost_one_comes_back(tmp_path):
    it = ReplacementHarness(tmp_path / "faults.jsonl", doomed=[(0, "generate")])

    async def run():
        first = await it.ask_all(2)
        while_down = (it.dispatcher.scheduler.up, it.health.status(it.health.clock.now()))
        await asyncio.sleep(2)
        return first, while_down, await it.ask_all(2)

    first, (up, down), afterwards = run_in_virtual_time(run())
    assert first == [1, 1] and afterwards == [0, 1] and up == [1]
    assert [line["worker"] for line in down] == ["generator/0"] and it.health.down == {}
    assert "generator/0 died in generate; it is restarted" in it.said[0] and "is back" in it.said[1]
    (event,) = (json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines())
    assert (event["role"], event["rank"], event["kind"], event["redispatched"]) == ("generator", 0, "died", 4)


def test_with_nobody_else_calls_wait_for_the_worker_to_come_back():
    it = ReplacementHarness(workers=1, doomed=[(0, "generate")])
    assert run_in_virtual_time(it.ask_all(3)) == [0, 0, 0]
    assert it.group.incarnations == [2]
    assert "no other worker is available meanwhile" in it.said[0]


def test_many_who_notice_one_loss_restart_it_once():
    it = ReplacementHarness(doomed=[(0, "generate")] * 3)

    async def run():
        answered = await it.ask_all(6)
        await asyncio.sleep(5)
        return answered

    assert run_in_virtual_time(run()) == [1] * 6
    assert it.group.incarnations == [2, 1]


def test_a_loss_of_an_incarnation_that_is_gone_is_old_news():
    it = ReplacementHarness()

    async def run():
        error = lost(it.group, 0)
        it.group.incarnations[0] = 2
        assert it.health.lost(error) is Decision.RETRY
        return await it.ask_all(2)

    assert run_in_virtual_time(run()) == [0, 1] and it.health.down == {}


def test_a_successor_that_hangs_before_it_is_back_is_given_up():
    it = ReplacementHarness(doomed=[(0, "generate")])

    async def run():
        await it.ask_all(1)
        old = lost(it.group, 0, "activity", "hung")
        await asyncio.sleep(0.95)
        assert it.group.incarnations[0] == 2 and (("generator", 0) in it.health.down)
        it.health.lost(old)
        before = list(it.group.given_up)
        it.health.lost(lost(it.group, 0, "load_weights", "hung"), silent_s=10.0)
        return before, it.group.given_up

    before, after = run_in_virtual_time(run())
    assert before == [0] and after == [0, 0]


def test_a_worker_that_never_completes_a_call_ends_the_run_after_so_many_restarts():
    it = ReplacementHarness(workers=1, max_restarts=2, doomed=[(0, "generate")] * 3)
    with pytest.raises(WorkerError, match=r"lost once more after 2 restarts \(cluster.max_restarts\)") as caught:
        run_in_virtual_time(it.ask_all(1))
    assert not isinstance(caught.value, WorkerLost) and it.group.incarnations == [3]


def test_restarts_between_completed_calls_are_not_counted_together():
    it = ReplacementHarness(workers=1, max_restarts=1, doomed=[])

    async def run():
        for _ in range(4):
            it.group.doomed.append((0, "generate"))
            await it.ask_all(1)

    run_in_virtual_time(run())
    assert it.group.incarnations == [5]


def test_a_worker_lost_while_it_starts_is_restarted_too():
    it = ReplacementHarness(workers=1, max_restarts=2, doomed=[(0, "generate"), (0, "start")])
    assert run_in_virtual_time(it.ask_all(1)) == [0] and it.group.incarnations == [3]


@pytest.mark.parametrize("unrestartable", [ModelError("the model is gone"), RuntimeError("a bug"), None], ids=str)
def test_while_others_are_left_one_that_cannot_be_replaced_is_started_again_after_longer_and_longer_delays(
        tmp_path, unrestartable):
    doomed = [(0, "generate")] if unrestartable else [(0, "generate")] + [(0, "start")] * 4
    it = ReplacementHarness(tmp_path / "faults.jsonl", max_restarts=2, doomed=doomed, unrestartable=unrestartable)

    async def run():
        first, started = await it.ask_all(2), {}
        while 5 not in started or it.health.down:
            started.setdefault(it.group.incarnation(0), asyncio.get_running_loop().time())
            assert await it.ask_all(1) == [1] or not it.health.missing
            if it.group.incarnation(0) == 4:
                it.group.unrestartable = None
            await asyncio.sleep(1)
        return first, [started[n] for n in range(2, 6)], await it.ask_all(2)

    first, starts, afterwards = run_in_virtual_time(run())
    assert first == [1, 1] and afterwards == [0, 1] and not it.health.missing
    delays = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert delays == (pytest.approx([16, 31, 61], abs=2) if unrestartable else pytest.approx([1, 16, 31], abs=2))
    lines = read_faults(tmp_path / "faults.jsonl")
    assert [line["recovery_s"] is None for line in lines] == [True, False]
    assert lines[0]["outcome"].startswith("not replaced yet, the others of generator go on: ")
    assert [line["redispatched"] for line in lines] == [4, 0]
    metrics = it.health.metrics()
    assert metrics["faults/missing_workers"] == 0 and metrics["faults/lost_workers"] == 1
    assert metrics["faults/seconds_down"] == pytest.approx(lines[1]["recovery_s"], abs=0.1)
    assert sum("The others of generator go on; it is started again in" in line for line in it.said) == 3


def test_one_that_is_missing_counts_as_so_and_the_last_that_is_left_ends_the_run():
    it = ReplacementHarness(workers=3, max_restarts=1, doomed=[
        (0, "generate"), (1, "generate"), (0, "start"), (1, "start")])

    async def run():
        assert await it.ask_all(1) == [2]
        await asyncio.sleep(10)
        assert len(it.health.missing) == it.health.metrics()["faults/missing_workers"] == 2
        assert [line["lost"] for line in it.health.status(0.0)] == ["died in generate, not replaced yet"] * 2
        it.group.doomed += [(2, "generate"), (2, "start")]
        await it.ask_all(1)

    with pytest.raises(WorkerError, match="generator/2 was lost once more after 1 restarts"):
        run_in_virtual_time(run())


def test_workers_lost_in_turns_in_calls_longer_than_the_delays_do_not_keep_each_other_in_use_without_end():
    """Calls of 5,000 s begin 2,500 s apart, and the longest delay is 600 s. By hand, with one restart at once, a worker
    is lost at the end of its first call, of the second and of the third, which follows a delayed restart: then it does
    not count any more. The other one's next loss ends the run, in less than four calls and their delays."""
    it = ReplacementHarness(workers=2, max_restarts=1)

    async def behave(rank, method, *args):
        if method == "generate":
            await asyncio.sleep(5000)
            raise lost(it.group, rank)

    it.group.answer = behave

    async def run():
        asked = [asyncio.create_task(it.ask_all(1))]
        await asyncio.sleep(2500)
        asked.append(asyncio.create_task(it.ask_all(1)))
        done, _ = await asyncio.wait(asked, timeout=200_000, return_when=asyncio.FIRST_COMPLETED)
        assert done, "the calls go on and on"
        assert asyncio.get_running_loop().time() < 2500 + 4 * (5000 + 60)
        asked[0].result()

    with pytest.raises(WorkerError, match="was lost once more after 1 restarts"):
        run_in_virtual_time(run())


def test_the_last_one_that_cannot_start_ends_the_run_with_its_own_words():
    it = ReplacementHarness(workers=1, doomed=[(0, "generate")], unrestartable=ModelError("the model is gone"))
    with pytest.raises(ModelError, match="the model is gone"):
        run_in_virtual_time(it.ask_all(1))


def test_what_cannot_start_is_told_to_who_waits_whatever_becomes_of_the_log():
    it = ReplacementHarness(workers=1, doomed=[(0, "generate")], unrestartable=ModelError("the model is gone"))

    def broken(*_, **__):
        raise RuntimeError("no log")

    it.health.log.write = broken
    with pytest.raises(ModelError, match="the model is gone"):
        run_in_virtual_time(asyncio.wait_for(it.ask_all(1), 100))


def test_a_role_s_own_error_and_a_lost_argument_are_lose_no_worker():
    it = ReplacementHarness()
    for error in (RewardError("no score"), lost(it.group, 0, kind="result")):
        async def fail(rank, method, *args, error=error):
            raise error

        it.group.answer = fail
        with pytest.raises(type(error)):
            run_in_virtual_time(it.ask_all(1))
    assert it.health.down == {} and it.dispatcher.scheduler.up == [0, 1]


@pytest.mark.parametrize("losses, most", [(2, 3), (3, 3)])
def test_what_lay_on_a_lost_node_is_made_again(losses, most):
    group, made = StandInGroup("reward", None), []
    group.incarnation = lambda rank: 1

    async def make():
        made.append(len(made))
        if len(made) <= losses:
            raise lost(group, 0, kind="result")
        return "whole"

    assert asyncio.run(retry_on_lost_object(make, most)) == "whole"
    assert len(made) == losses + 1


def test_but_not_for_ever_and_not_for_other_losses():
    group, made = StandInGroup("reward", None), []
    group.incarnation = lambda rank: 1

    async def make(kind):
        made.append(kind)
        raise lost(group, 0, kind=kind)

    for kind in ("result", "died"):
        with pytest.raises(WorkerLost):
            asyncio.run(retry_on_lost_object(lambda kind=kind: make(kind), 3))
    assert made == ["result"] * 4 + ["died"]


@pytest.mark.parametrize("method", ["begin_weights", "load_weights", "finish_weights"])
def test_a_publication_goes_on_without_a_generator_that_is_lost_in_it(method):
    it = PublishingHarness(doomed=[(0, method)])

    async def run():
        await it.publish(1)
        confirmed = list(it.group.versions)
        await asyncio.sleep(10)
        return confirmed

    assert run_in_virtual_time(run())[1] == 1
    assert it.group.versions == [1, 1] and it.dispatcher.scheduler.up == [0, 1] and it.group.incarnations == [2, 1]
    assert "caught up to version 1" in it.said[-1]


def test_a_generator_catches_up_between_a_publication_and_the_next_update_alone():
    """It comes back during the update to version 3, whose weights are nobody's before they are published."""
    it = PublishingHarness(doomed=[])

    async def run():
        await it.publish(1, 2)
        it.group.doomed.append((0, "generate"))
        await it.ask_all(1)
        loads = len([m for m, _ in it.group.log if m == "load_weights"])
        async with it.sync.changing():
            await asyncio.sleep(20)
            assert it.group.versions == [0, 2], "started, and waiting"
            assert len([m for m, _ in it.group.log if m == "load_weights"]) == loads
            await it.sync.publish(3)
            assert it.group.versions == [0, 3]
        await asyncio.sleep(5)

    run_in_virtual_time(run())
    assert it.group.versions == [3, 3] and it.dispatcher.scheduler.up == [0, 1]


def test_while_all_generators_are_away_a_version_is_published_to_nobody_and_they_catch_up():
    it = PublishingHarness(workers=1, doomed=[(0, "generate")])

    async def run():
        asked = asyncio.create_task(it.ask_all(1))
        await asyncio.sleep(0.2)
        await it.publish(1)
        return await asked

    assert run_in_virtual_time(run()) == [0] and it.group.versions == [1]


def test_who_waits_for_a_generator_hears_of_a_learner_lost_while_it_catches_up():
    it = PublishingHarness(workers=1, doomed=[])

    async def run():
        await it.publish(1)
        it.group.doomed.append((0, "generate"))
        it.learner_lost = 1
        with pytest.raises(WorkerLost, match="policy/0 died in weight_bucket"):
            await it.ask_all(1)
        return await it.ask_all(1)

    it.policy.incarnation = lambda rank: 1
    assert run_in_virtual_time(run()) == [0] and it.group.versions == [1]


def test_the_first_publication_of_all_goes_on_when_the_only_generator_is_lost_at_its_first_question():
    it = PublishingHarness(workers=1, doomed=[(0, "fused_groups")])

    async def run():
        await it.publish(1)
        return await it.ask_all(1)

    assert run_in_virtual_time(run()) == [0]
    assert it.group.versions == [1] and it.group.incarnations == [2]


def test_a_learner_that_hangs_while_it_gathers_is_told_as_soon_as_it_is_given_up_and_no_generator_is_blamed():
    it = PublishingHarness()
    it.policy.incarnation = lambda rank: 1

    async def learner(rank, method, *args):
        if method == "plan_weights":
            return WeightsPlan(PublicationSize(2, 200), PublicationSize(2, 200))
        await asyncio.sleep(1e6 if rank == 0 else 7)  # one waits for the other, which stands still
        raise lost(it.policy, rank, method, "stale")

    it.policy = StandInGroup("policy", learner, workers=2)
    it.policy.incarnation = lambda rank: 1
    it.roles.by_section["policy"] = it.policy

    async def run():
        with pytest.raises(WorkerLost, match="policy/1 stale in weight_bucket"):
            await asyncio.wait_for(it.publish(1), 100)
        assert it.dispatcher.scheduler.up == [0, 1] and it.health.down == {}
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    run_in_virtual_time(run())


def test_nobody_catches_up_with_learners_that_are_being_replaced():
    it = PublishingHarness(workers=1, doomed=[])

    async def run():
        await it.publish(1, 2)
        await it.sync.forget()
        it.group.doomed.append((0, "generate"))
        asked = asyncio.create_task(it.ask_all(1))
        await asyncio.sleep(20)
        assert not asked.done() and it.group.versions == [0]
        async with it.sync.changing():
            await it.sync.publish(1, resend=True)
        return await asked

    assert run_in_virtual_time(run()) == [0] and it.group.versions == [1]


class Watched(ReplacementHarness):
    """Generators that are looked at while something is under way."""

    def __init__(self, heartbeat_timeout_s=10.0, **generators):
        super().__init__(heartbeat_timeout_s=heartbeat_timeout_s, **generators)
        self.progress = TokenProgress(self.dispatcher.scheduler, self.health, heartbeat_timeout_s)
        self.began = self.roles.clock.now()

    async def look_on(self, seconds, phase="generate", tokens_a_second=0):
        """Seconds until the first generator is taken for hung; None if it is not."""
        loop = asyncio.get_running_loop()
        self.roles.clock.now = loop.time
        self.roles.clock.under_way.add(Task("generator", 0, phase, loop.time()))
        watching = asyncio.create_task(self.progress.run())
        until, began = loop.time() + seconds, loop.time()
        while loop.time() < until and not self.group.given_up:
            await asyncio.sleep(1)
            self.group.tokens += tokens_a_second
        watching.cancel()
        return loop.time() - began if self.group.given_up else None


def test_a_generator_without_a_token_for_a_lease_is_hung():
    it = Watched()
    assert 10 < run_in_virtual_time(it.look_on(60)) < 16
    assert "produced no token for" in it.said[0] and "cluster.heartbeat_timeout_s=10" in it.said[0]


def test_tokens_however_few_are_a_sign_of_life():
    assert run_in_virtual_time(Watched().look_on(60, tokens_a_second=1)) is None


def test_one_that_has_answered_since_the_last_look_is_not_asked(monkeypatch):
    it, asked = Watched(), []
    dispatcher, call = it.roles.dispatcher(it.roles.generators), it.group.call

    def answering(rank, method, *args, **options):
        asked.append(method.__name__)
        return call(rank, method, *args, **options)

    async def run():
        monkeypatch.setattr(it.group, "call", answering)
        watched = asyncio.create_task(it.look_on(60))
        for _ in range(30):
            await asyncio.sleep(1)
            dispatcher.scheduler.finished[0] += 1
        return await watched

    assert 40 < run_in_virtual_time(run()) < 46, "it was silent after 30 s, for a lease of 10 s"
    assert asked[0] == "activity" and len(asked) < 8, asked


def test_nobody_is_asked_in_the_first_part_of_a_call(monkeypatch):
    it, asked = Watched(heartbeat_timeout_s=40.0), []

    async def run():
        monkeypatch.setattr(it.group, "call", lambda *call, **_: asked.append(call))
        under_way, now = it.roles.clock.under_way, asyncio.get_running_loop().time
        watched = asyncio.create_task(it.look_on(60))
        for _ in range(6):  # it is done with a call in 9 s, and with the next
            await asyncio.sleep(9)
            under_way.clear()
            under_way.add(Task("generator", 0, "generate", now()))
        return await watched

    assert run_in_virtual_time(run()) is None and asked == []


def test_a_generator_without_an_open_request_is_not_hung_whatever_its_callers_say():
    """A caller that was stopped goes on to say that it waits."""
    it = Watched()
    it.group.requests = 0
    assert run_in_virtual_time(it.look_on(60, phase="sample")) is None


def test_a_generator_is_silent_since_its_own_oldest_request_and_not_since_the_driver_s_oldest_call():
    it, answer = Watched(), LossyGenerators.behave

    async def younger(rank, method, *args):
        activity = await answer(it.group, rank, method, *args)
        return activity._replace(oldest_s=max(0.0, asyncio.get_running_loop().time() - 1020.0))

    it.group.answer = younger

    async def run():
        await asyncio.sleep(1000.0 - asyncio.get_running_loop().time())
        return await it.look_on(60)

    assert 30 < run_in_virtual_time(run()) < 36


def test_while_it_takes_weights_an_answer_is_enough():
    assert run_in_virtual_time(Watched().look_on(60, phase="publish")) is None


def test_one_that_does_not_answer_is_hung_whatever_it_does():
    it = Watched(doomed=[(0, "activity")] * 100)
    assert 10 < run_in_virtual_time(it.look_on(60, phase="publish")) < 18


def test_an_idle_generator_may_be_silent():
    it = Watched()

    async def run():
        await it.look_on(1)
        it.roles.clock.under_way.clear()
        watching = asyncio.create_task(it.progress.run())
        await asyncio.sleep(60)
        watching.cancel()

    run_in_virtual_time(run())
    assert it.group.given_up == []


class Scorers(StandInGroup):
    """One scorer with a call under way whose heartbeats are `counts(seconds)`."""

    def __init__(self, counts):
        super().__init__("reward", self.answer_never)
        self._counts = counts
        self.given_up = []

    async def answer_never(self, rank, method, *args):
        await asyncio.sleep(1e6)

    async def heartbeats(self, rank):
        return self._counts(asyncio.get_running_loop().time())

    def incarnation(self, rank):
        return 1

    def processes(self, rank):
        return None

    def give_up(self, rank, reason):
        self.given_up.append((asyncio.get_running_loop().time(), reason))


def scorer_hangs_after(counts, monkeypatch):
    """(seconds, reason) when a busy scorer with these heartbeats is given up; None within a minute."""
    scorers = Scorers(counts)

    async def run():
        now = asyncio.get_running_loop().time
        monkeypatch.setattr(detectors, "time", SimpleNamespace(monotonic=now))
        health = HealthMonitor(ClusterConfig(heartbeat_timeout_s=10.0), clock=StepClock(now))
        health.register(LeastLoadedScheduler(scorers))
        health.clock.under_way.add(Task("reward", 0, "reward", now()))
        watching = asyncio.create_task(HeartbeatDetector(health.watched, 10.0, health.silent).run())
        while not scorers.given_up and now() < 60:
            await asyncio.sleep(1)
        watching.cancel()
        for task in asyncio.all_tasks() - {asyncio.current_task(), watching}:
            task.cancel()

    run_in_virtual_time(run())
    return scorers.given_up[0] if scorers.given_up else None


def test_a_busy_scorer_whose_heartbeats_stand_still_is_hung(monkeypatch):
    assert scorer_hangs_after(lambda seconds: int(seconds), monkeypatch) is None
    assert scorer_hangs_after(lambda _: None, monkeypatch) is None, "it has not begun to count"
    assert scorer_hangs_after(lambda seconds: 1 // (seconds > 13) and 1, monkeypatch) is not None, "after failed looks"
    seconds, reason = scorer_hangs_after(lambda seconds: min(int(seconds), 20), monkeypatch)
    assert 30 < seconds < 36
    assert "reward/0 gave no sign of life for" in reason and "cluster.heartbeat_timeout_s=10" in reason


def test_a_learner_that_stands_still_is_given_up_and_calls_for_a_restart_of_all():
    learners = Scorers(lambda _: 1)
    health = HealthMonitor(ClusterConfig(heartbeat_timeout_s=10.0))
    health.register_learners([learners])
    assert list(health.watched()) == [(learners, 0)], "without a call too"

    async def run():
        health.silent(learners, 0, 11.0)

    asyncio.run(run())
    assert "its process has stood still for 11 s (cluster.heartbeat_timeout_s=10)" in learners.given_up[0][1]
    assert health.lost(lost(learners, 0)) is Decision.RESTART_LEARNERS and health.down == {}


@pytest.mark.parametrize("kind, decision", [("died", Decision.FAIL), ("result", Decision.REPRODUCE)])
def test_a_worker_that_is_not_registered_is_not_replaced(kind, decision):
    health = HealthMonitor()
    assert health.lost(lost(Scorers(None), 0, kind=kind)) is decision and health.down == {}
