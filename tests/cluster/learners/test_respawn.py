"""Processes that die, hang or leave others behind, and what takes their place: a real Ray, a role of no weight."""

import asyncio
import os
import signal
import time

import psutil
import pytest

from rlhf_ray.config.run import PlacementConfig
from rlhf_ray.errors import WorkerLost
from rlhf_ray.workers.calls import Deadline
from rlhf_ray.workers.heartbeat import PERIOD_S
from tests.cluster.learners.sleeper import Sleeper

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def sleepers(floor):
    """call(coroutine), and a group of two ranks with a child process each."""
    group = floor.spawn_role("sleeper", Sleeper, PlacementConfig(workers=2, cpus=0.1),
                             lambda rank: {"rank": rank, "children": 1})
    assert floor.loop.run_until_complete(group.start()) == [0, 1]
    return floor.loop.run_until_complete, group


def gone(pid):
    """Whether there is no such process, or only its remains."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def lost_in(call):
    """The error of a call that no answer comes to."""
    with pytest.raises(WorkerLost) as caught:
        await call.done()
    return caught.value


def pids(group, rank):
    return [pid for pid, _ in group.processes(rank).members]


async def again(group, rank, reason="it was restarted"):
    await group.respawn(rank, reason)
    assert await group.start_one(rank) == rank
    assert (await group.call(rank, Sleeper.echo, "hello").value())[0] == "hello"


def test_a_stopped_process_and_its_child_are_killed_and_another_takes_their_place(sleepers):
    do, group = sleepers
    old, began, incarnation = pids(group, 0), time.monotonic(), group.incarnation(0)
    assert len(old) == 2
    os.kill(old[0], signal.SIGSTOP)
    call = group.call(0, Sleeper.echo, 1)

    async def hang_and_heal():
        waiting = asyncio.create_task(lost_in(call))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await again(group, 0, "it hung")
        return await waiting

    error = do(hang_and_heal())
    assert (error.worker, error.method, error.kind, error.incarnation) == ("sleeper/0", "echo", "stale", incarnation)
    assert "it hung" in str(error) and error.age_s >= 0.3
    assert all(gone(pid) for pid in old) and not set(old) & set(pids(group, 0))
    assert group.incarnation(0) == incarnation + 1
    assert time.monotonic() - began < 30


def test_a_process_that_ends_is_told_at_once_and_its_child_is_not_left_behind(sleepers):
    do, group = sleepers
    old = pids(group, 1)
    error = do(lost_in(group.call(1, Sleeper.leave)))
    assert (error.kind, error.worker) == ("died", "sleeper/1") and gone(old[0])
    do(again(group, 1))
    assert gone(old[1])


def test_a_call_that_was_given_the_result_of_a_dead_worker_is_not_its_own_worker_s_loss(sleepers):
    do, group = sleepers

    async def pass_on():
        given = group.call(1, Sleeper.leave)
        return await lost_in(group.call(0, Sleeper.echo, given.ref)), await lost_in(given)

    error, cause = do(pass_on())
    assert (error.kind, error.worker, cause.kind, cause.worker) == ("result", "sleeper/0", "died", "sleeper/1")
    assert "an argument of echo of sleeper/0 was lost" in str(error)
    do(again(group, 1))


def test_an_answer_of_a_worker_that_was_given_up_is_refused_though_it_comes(sleepers):
    do, group = sleepers
    _, pid = do(group.call(0, Sleeper.echo, 1).value())

    async def given_up():
        call = group.call(0, Sleeper.echo, 2)
        await asyncio.wait([call.timing.as_future()], timeout=20)  # the answer is there, nobody has asked for it
        group.give_up(0, "it was cut off")
        return await lost_in(call)

    assert "it was cut off" in str(do(given_up()))
    assert not gone(pid), "the process lives, only its word does not count"
    do(again(group, 0))


def test_a_worker_that_says_it_cannot_work_any_more_is_lost_too(sleepers):
    do, group = sleepers
    error = do(lost_in(group.call(1, Sleeper.cannot)))
    assert (error.kind, error.worker, str(error)) == ("broke", "sleeper/1", "no engine any more")


def test_a_deadline_that_passes_names_worker_method_and_age(sleepers):
    do, group = sleepers
    error = do(lost_in(group.call(0, Sleeper.sleep, 4, deadline=Deadline(0.5))))
    assert error.kind == "hung" and "sleeper/0 did not answer sleep within 0.5 s" in str(error) and error.age_s >= 0.5


def test_the_heartbeats_stand_still_with_its_process(sleepers):
    do, group = sleepers
    (pid, *_) = pids(group, 0)

    async def counted_within(seconds):
        before = await group.heartbeats(0)
        await asyncio.sleep(seconds)
        return await group.heartbeats(0) - before

    assert do(counted_within(3 * PERIOD_S)) >= 2
    os.kill(pid, signal.SIGSTOP)
    try:
        do(asyncio.sleep(0.5))  # a count that was under way
        assert do(counted_within(2 * PERIOD_S)) == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert do(counted_within(3 * PERIOD_S)) >= 1
