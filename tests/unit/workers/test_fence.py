"""Worker given up: waits end at once, late answers are refused. And processes that are killed whatever they do."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlhf_ray.cluster.processes import kill
from rlhf_ray.errors import WorkerLost
from rlhf_ray.workers.calls import Call, Deadline, Fence


def call_to(fence, result):
    return Call("generator", 2, "generate", (result,), result, Deadline(100.0), time.monotonic(), fence)


def test_closing_ends_the_waits_that_are_under_way_with_its_reason():
    async def run():
        fence = Fence(incarnation=3)
        waiting = [asyncio.create_task(call_to(fence, asyncio.get_running_loop().create_future()).value())
                   for _ in range(2)]
        await asyncio.sleep(0.01)
        fence.close("it made no token")
        fence.close("something later")
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)

    for error in asyncio.run(run()):
        assert isinstance(error, WorkerLost) and "it made no token" in str(error)
        assert (error.worker, error.incarnation, error.method, error.kind) == ("generator/2", 3, "generate", "stale")


def test_an_answer_that_is_there_is_refused_once_its_worker_was_given_up():
    async def run():
        fence, result = Fence(), asyncio.get_running_loop().create_future()
        result.set_result(7)
        first = await call_to(fence, result).value()
        fence.close("it was cut off")
        with pytest.raises(WorkerLost, match="it was cut off"):
            await call_to(fence, result).value()
        return first

    assert asyncio.run(run()) == 7


def sleeper():
    """A process with a child, both asleep; (it, the child)."""
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    found = psutil.Process(process.pid)
    return process, found, found.children()[0]


def test_a_stopped_process_is_killed_with_its_children():
    process, found, child = sleeper()
    os.kill(process.pid, signal.SIGSTOP)
    left = asyncio.run(reaping(process, lambda: kill([(process.pid, found.create_time())])))
    assert left == [] and not found.is_running()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def reaping(process, work):
    """Do `work` while somebody waits for the process, as its parent does."""
    done, _ = await asyncio.gather(asyncio.to_thread(work), asyncio.to_thread(process.wait))
    return done


def test_a_pid_that_another_process_has_now_is_left_alone():
    process, found, child = sleeper()
    try:
        assert kill([(process.pid, found.create_time() - 1), (2**22 + 1, 0.0)]) == []
        assert process.poll() is None and child.is_running()
    finally:
        kill([(process.pid, found.create_time())], grace_s=0)
        process.wait(10)


HOLDER = """
import mmap, os, sys, time
path = "/dev/shm/" + sys.argv[1]
with open(path, "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
print("up", flush=True)
time.sleep(600)
"""


def holder(name):
    """A process that has a shared-memory segment in use."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, name], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    return process, (process.pid, psutil.Process(process.pid).create_time())


def test_shared_memory_goes_with_the_last_killed_process_that_used_it():
    name = f"rlhf-ray-test-{os.getpid()}"
    segment = Path("/dev/shm") / name
    (first, one), (second, other) = holder(name), holder(name)
    try:
        asyncio.run(reaping(first, lambda: kill([one])))
        assert segment.exists(), "another process uses it"
        asyncio.run(reaping(second, lambda: kill([other])))
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)
        kill([one, other])


LOCKER = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print("/dev/shm/sem." + lock._semlock.name.removeprefix("/"), flush=True)
time.sleep(600)
"""


def test_a_semaphore_goes_with_a_process_whose_tidier_was_killed_too():
    """As Ray kills a worker: with all its children."""
    process = subprocess.Popen([sys.executable, "-c", LOCKER], stdout=subprocess.PIPE, text=True)
    segment = Path(process.stdout.readline().strip())
    found = psutil.Process(process.pid)
    children = found.children(recursive=True)
    assert children, "Python's resource tracker"

    def end():
        for each in (*children, process):
            each.kill()
        process.wait(10)
        psutil.wait_procs(children, timeout=10)
        assert segment.exists()

    kill([(process.pid, found.create_time())], end=end)
    assert not segment.exists()
