"""A call's deadline and the words for what went wrong, on futures in place of object references."""

import asyncio
import time
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.errors import RESTARTABLE, RewardError, WorkerError
from rlhf_ray.roles.reward_scorer import RewardScorer
from rlhf_ray.workers.calls import GRACE_S, Call, Deadline, traffic
from tests.unit.workers.local_groups import local_group


def call(result, timing, timeout_s=5.0, age_s=0.0):
    deadline = Deadline(timeout_s, "cluster.call_timeout_s")
    return Call("reward_scorer", 1, "score", (result, "second"), timing, deadline, time.monotonic() - age_s)


def failing(error):
    future = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


def ready(value):
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def answer(make):
    """Await what `make()` builds inside a loop."""

    async def run():
        return await make()

    return asyncio.run(run())


def task_error(cause):
    return RayTaskError("score", "remote traceback", cause)


def test_a_call_gives_its_timing_and_its_results():
    async def run():
        it = call(ready(7), ready(0.5))
        assert (it.worker, it.ref is it.refs[0]) == ("reward_scorer/1", True)
        return await it.value(), await it.done()

    assert asyncio.run(run()) == (7, 0.5)


def test_what_the_driver_receives_is_counted():
    before = traffic.received
    answer(lambda: call(ready(b"x" * 1000), None).value())
    assert 1000 < traffic.received - before < 1100


def test_a_call_past_its_deadline_names_worker_method_and_setting():
    said = r"^reward_scorer/1 did not answer score within 0\.05 s \(cluster\.call_timeout_s\)"
    with pytest.raises(WorkerError, match=said):
        answer(lambda: call(asyncio.get_running_loop().create_future(), None, timeout_s=0.05).value())


@pytest.mark.parametrize(("deadline", "field"), [
    (None, "(cluster.call_timeout_s)"), (Deadline(0.02, "cluster.start_timeout_s"), "(cluster.start_timeout_s)"),
    (Deadline(0.02), ""),
])
def test_a_deadline_of_its_own_is_not_told_by_the_name_of_another_s(deadline, field, monkeypatch):
    """A group whose one worker answers nothing."""

    async def run():
        silent = asyncio.get_running_loop().create_future
        group = local_group(monkeypatch, lambda *_: [silent(), silent()])
        late = group.call(0, RewardScorer.score, deadline=deadline)
        await replace(late, started=late.started - 10).done()

    with pytest.raises(WorkerError) as told:
        asyncio.run(run())
    assert str(told.value) == f"reward_scorer/0 did not answer score within 0.02 s {field}".rstrip()


def test_the_deadline_counts_from_the_call_and_not_from_the_waiting():
    async def run():
        loop = asyncio.get_running_loop()
        late = replace(call(loop.create_future(), None, timeout_s=100), started=loop.time() - 101)
        with pytest.raises(WorkerError, match="within 100 s"):
            await late.value()
        return loop.time()

    assert run_in_virtual_time(run()) == pytest.approx(GRACE_S)


def test_a_roles_own_error_arrives_as_it_was_raised():
    with pytest.raises(RewardError, match="^no score$"):
        answer(lambda: call(failing(task_error(task_error(RewardError("no score")))), None).value())


def test_an_error_without_words_names_worker_method_and_cause():
    with pytest.raises(WorkerError, match=r"^reward_scorer/1 failed in score: ZeroDivisionError: by 0\n") as caught:
        answer(lambda: call(failing(task_error(ZeroDivisionError("by 0"))), None).value())
    assert "remote traceback" in str(caught.value)


def test_a_dead_worker_is_named():
    with pytest.raises(WorkerError, match=r"^reward_scorer/1 died in score: \S") as caught:
        answer(lambda: call(None, failing(ActorDiedError())).done())
    assert caught.value.exit_code in RESTARTABLE


def test_a_lost_result_is_named():
    error = ObjectLostError("ab" * 14, None, "")
    with pytest.raises(WorkerError, match=r"^the result of score of reward_scorer/1 was lost: \S"):
        answer(lambda: call(failing(error), None).value())
