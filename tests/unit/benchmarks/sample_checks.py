"""Checks that end in every way a check can; `runner.rows_of` imports them in their own processes."""

import asyncio
import os
import signal
import time
from functools import partial

from benchmarks.gpu_check.rows import Row, judged
from benchmarks.gpu_check.runner import Measurement, in_turn


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


def _one(name, does=lambda: None):
    yield Row(f"{name} begins", "")
    does()
    yield Row(f"{name} ends", str(os.getpid()))


def _raises():
    raise ValueError("out of memory")


def several(place):
    """Measurements of which the second fails, and the fourth ends the process."""
    does = {"first": lambda: None, "failing": _raises, "third": lambda: None,
            "killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "long": lambda: None, "last": lambda: None}
    yield from in_turn(place, [
        Measurement(name, 900.0 if name == "long" else 0.0, partial(_one, name, call)) for name, call in does.items()
    ], lambda: None)


def uncleaned(place):
    """Measurements after which nothing can be freed."""
    yield from in_turn(place, [Measurement(name, 0.0, partial(_one, name)) for name in ("first", "second")], _raises)


def stuck(place):
    """A measurement that does not end, and one behind it."""
    yield from in_turn(place, [Measurement(name, 0.0, partial(_one, name, lambda: time.sleep(600)))
                               for name in ("first", "second")], lambda: None)
