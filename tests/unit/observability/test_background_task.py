"""Tasks beside a run: what one raises is told, it works again, and a run does not go on without an essential one."""

import asyncio
import contextlib

import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator import live_status
from rlhf_ray.errors import BackgroundTaskError
from rlhf_ray.observability import control_files
from rlhf_ray.observability.background_task import RETRY_PAUSES_S, background_task
from rlhf_ray.observability.control_files import answering
from rlhf_ray.observability.faults import FaultLog, read_faults
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.workers import node_drain
from rlhf_ray.workers.detectors import HeartbeatDetector
from rlhf_ray.workers.health_monitor import HealthMonitor


def failing(times, done=None):
    """Work that raises so many times, then sets `done` and goes on for ever."""
    count = [0]

    async def work():
        count[0] += 1
        if count[0] <= times:
            raise ZeroDivisionError("division by zero")
        if done is not None:
            done.set()
        await asyncio.Event().wait()

    return work


def test_a_task_that_fails_is_told_of_and_begins_again():
    async def run():
        told, done = [], asyncio.Event()
        async with background_task("the look", failing(2, done), lambda *failure: told.append(failure)):
            await asyncio.wait_for(done.wait(), 60)
        return told

    told = run_in_virtual_time(run())
    assert [(name, str(error), again) for name, error, again in told] == [
        ("the look", "division by zero", RETRY_PAUSES_S[0]), ("the look", "division by zero", RETRY_PAUSES_S[1])]


def test_a_harmless_task_that_always_fails_ends_nothing_and_is_tried_ever_more_seldom():
    async def run():
        told = []
        async with background_task("the look", failing(10**6), lambda *failure: told.append(failure)):
            await asyncio.sleep(3600)
        return len(told)

    assert 50 < run_in_virtual_time(run()) < 100


def test_an_essential_task_that_fails_again_and_again_ends_the_run():
    async def run():
        async with background_task("the watch", failing(10**6), lambda *_: None, essential=True):
            await asyncio.sleep(10**6)

    with pytest.raises(BackgroundTaskError, match="the watch failed 6 times in a row.*ZeroDivisionError") as caught:
        run_in_virtual_time(run())
    assert caught.value.exit_code == 69


def test_an_essential_task_may_fail_now_and_then():
    async def run():
        async def work():
            await asyncio.sleep(100)
            raise ZeroDivisionError("division by zero")

        told = []
        async with background_task("the watch", work, lambda *failure: told.append(failure), essential=True):
            await asyncio.sleep(5000)
        return len(told)

    assert run_in_virtual_time(run()) > 40


def test_a_run_that_is_cancelled_or_fails_meanwhile_ends_as_it_would_have():
    async def run(error):
        async with background_task("the look", failing(0), lambda *_: None, essential=True):
            raise error

    for error in (ValueError("mine"), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            run_in_virtual_time(run(error))


def test_a_failure_is_warned_of_and_kept_among_the_faults(tmp_path):
    said, path = [], tmp_path / "faults.jsonl"
    FaultLog(path, said.append).failed("the watch over workers", ZeroDivisionError("division by zero"), 2.0)
    assert said == ["the watch over workers failed (ZeroDivisionError: division by zero); it starts again in 2 s"]
    (event,) = read_faults(path)
    assert (event["role"], event["method"], event["kind"]) == ("coordinator", "the watch over workers", "failed")


class Once:
    """Raises the first time that it is called; then `then` is called."""

    def __init__(self, then):
        self.calls, self._then = 0, then

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 1:
            raise ZeroDivisionError("division by zero")
        return self._then(*args, **kwargs)


@contextlib.asynccontextmanager
async def nothing():
    yield


async def forever():
    await asyncio.Event().wait()


def tasks_of_a_run(tmp_path, monkeypatch, told):
    """By name: the part of each task that raises once, and what runs the task."""
    directory = RunDirectory(tmp_path)

    def tell(name, error, again_s):
        told.append(name)

    status = Once(lambda: None)
    questions = Once(lambda directory: [])
    monkeypatch.setattr(control_files, "_take_requests", lambda d: questions(d) if started else [])
    started = []
    drains = Once(dict)
    monkeypatch.setattr(node_drain, "own_node", lambda: "here")
    monkeypatch.setattr(node_drain, "draining_nodes", lambda: {"node": None})
    monkeypatch.setattr(node_drain.DrainWatch, "handle", lambda self, node, left_s: drains())
    watched = Once(list)

    def heartbeats():
        monitor = HealthMonitor(ClusterConfig(), FaultLog())
        monitor.log.failed = tell
        return monitor.at_work([HeartbeatDetector(watched, 300.0, monitor.silent)])

    return {
        "status": (status, lambda: live_status.live_status(status, directory, on_failure=tell)),
        "control": (questions, lambda: (answering(directory, {}, on_failure=tell), started.append(1))[0]),
        "drains": (drains, lambda: background_task("drains", node_drain.DrainWatch(print, print, []).run,
                                                   tell)),
        "heartbeats": (watched, heartbeats),
    }


@pytest.mark.parametrize("name", ["status", "control", "drains", "heartbeats"])
def test_each_task_of_a_run_works_again_after_it_raised_once(tmp_path, monkeypatch, name):
    told = []
    part, begin = tasks_of_a_run(tmp_path, monkeypatch, told)[name]

    async def run():
        if name == "control":
            monkeypatch.setattr(control_files, "_refuse_old", lambda directory: None)
        monkeypatch.setattr(asyncio, "to_thread", lambda job, *args: asyncio.sleep(0, job(*args)))
        async with begin():
            await asyncio.sleep(30)

    run_in_virtual_time(run())
    assert len(told) == 1 and part.calls > 3


