"""Threads that write files in order: their deadline is on progress, and a disk that hangs keeps nobody else."""

import asyncio
import os
import threading
import time

import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray import failpoints
from rlhf_ray.errors import DiskStalled
from rlhf_ray.failpoints import VARIABLE
from rlhf_ray.files.fsync import fsync_path, moved, operation
from rlhf_ray.files.writer_thread import FileThread


@pytest.fixture
def hanging(monkeypatch):
    """hanging(place): from now on the flushes at that place hang, until the test is over."""
    yield lambda place="fsync": monkeypatch.setenv(VARIABLE, f"{place}:hang")
    monkeypatch.delenv(VARIABLE, raising=False)
    while failpoints.hanging():
        time.sleep(0.01)


def test_jobs_are_done_in_the_order_given_and_answer_what_they_return():
    thread, done = FileThread("test", 60.0), []

    async def run():
        first = thread.submit(lambda: (time.sleep(0.05), done.append(1)))
        assert await thread.run(lambda n: done.append(n) or n, 2) == 2
        assert first.done() and done == [1, 2]
        with pytest.raises(ValueError, match="no"):
            await thread.run(lambda: int("no"))
        assert thread.do(lambda: 3) == 3 and not thread.busy

    asyncio.run(run())


def test_time_in_which_the_process_itself_was_stopped_does_not_count(tmp_path, hanging, monkeypatch):
    """As by SIGSTOP, or by a scheduler that lets others run."""
    (tmp_path / "a").touch()
    hanging()

    def answer():
        monkeypatch.delenv(VARIABLE)
        while failpoints.hanging():
            time.sleep(0.01)

    async def run():
        loop = asyncio.get_running_loop()
        loop.call_later(100.0, loop.jump, 1000.0)
        loop.call_later(1150.0, answer)
        await FileThread("test", 600.0).run(fsync_path, tmp_path / "a")
        return loop.time()

    assert 1150 <= run_in_virtual_time(run()) < 1200


@pytest.mark.parametrize("how", ["run", "do"])
def test_a_flush_that_hangs_ends_in_an_error_that_names_it_and_all_later_jobs_fail_at_once(tmp_path, hanging, how):
    file, written = tmp_path / "a", []
    file.touch()
    hanging()

    async def run():
        thread = FileThread("test", 0.3 if how == "do" else 600.0)
        later = []
        with pytest.raises(DiskStalled, match=f"flush {file} has made no progress for") as caught:
            later = [thread.submit(fsync_path, file), thread.submit(written.append, 1)]
            if how == "do":
                thread.do(written.append, 2)
            else:
                await thread.run(written.append, 2)
        assert caught.value.exit_code == 69
        assert all(isinstance(future.exception(0), DiskStalled) for future in later)
        with pytest.raises(DiskStalled):
            thread.submit(written.append, 3).result(0)
        return thread

    thread = asyncio.run(run()) if how == "do" else run_in_virtual_time(run())
    del os.environ[VARIABLE]  # the disk is back: what comes after a gap is not written
    time.sleep(0.1)
    assert written == [] and thread.stalled is not None


def test_a_slow_disk_that_moves_is_waited_for():
    thread = FileThread("test", 0.2)

    def slow():
        with operation("write", "large"):
            for _ in range(8):
                time.sleep(0.1)
                moved()
        return "written"

    assert thread.do(slow) == "written"


def test_bytes_of_one_long_write_are_progress(tmp_path):
    thread = FileThread("test", 0.4)

    def grows():
        with open(tmp_path / "large", "wb", buffering=0) as file:
            for _ in range(8):
                time.sleep(0.15)
                file.write(bytes(4096))

    thread.do(grows)


def test_who_waits_behind_a_job_that_moves_is_not_told_of_a_hung_disk():
    thread = FileThread("test", 0.3)
    for _ in range(6):
        thread.submit(time.sleep, 0.1)
    assert thread.do(lambda: "last") == "last"


def test_in_a_hurry_a_hung_disk_is_given_up_within_seconds(tmp_path, hanging):
    hanging()

    async def run():
        thread = FileThread("test", 600.0)
        asyncio.get_running_loop().call_later(2, thread.hurry)
        with pytest.raises(DiskStalled, match="no progress for [5-9] s"):
            await thread.run(fsync_path, tmp_path)

    run_in_virtual_time(run())


def test_who_is_cancelled_leaves_the_job_where_it_is():
    thread, done = FileThread("test", 60.0), threading.Event()

    async def run():
        task = asyncio.create_task(thread.run(done.wait, 5))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert thread.busy
        done.set()
        assert await thread.run(lambda: "next") == "next"

    asyncio.run(run())
