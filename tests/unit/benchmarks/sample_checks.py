"""Checks that end in every way a check can; `runner.rows_of` imports them in their own processes."""

import asyncio
import os
import signal
import time

from benchmarks.gpu_check.rows import Row, judged


def fails(place):
    yield Row("a figure", "1")
    print("said before the error")
    raise ValueError("no such kernel\nmore of it")


def killed(place):
    yield Row("a figure", "2")
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(place):
    yield Row("a figure", "3")
    time.sleep(600)


async def finds_a_mistake(place):
    await asyncio.sleep(0)
    yield judged("on the CPU", str(place.directory.is_dir()), place.gpu, "at most 1")
