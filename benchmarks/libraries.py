"""What libraries would do in place of code of our own: the figures of "Libraries" in docs/architecture.md.

    python -m benchmarks.libraries regex     # the package `regex` in place of `re` in a process that can be killed
    python -m benchmarks.libraries actor     # a Ray actor in place of a reward function's process; starts a small Ray
    python -m benchmarks.libraries numbers   # math-verify in place of the reward `number`; pip install math-verify
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.machine import cpu_name

EXPONENTIAL = "(a|aa)+$"
"""A pattern that takes exponential time on a text of "a" that another letter ends."""
NESTED = "(?:a{1000}){1000}"
DIFFERENT = (("x{d}", "x{d}"), ("x{d}", "y"), ("[[:alpha:]]", "b"), (r"\\boxed{i", r"\boxed{i"), (r"\w", "²"),
             (r"\s", "\x1c"))
"""Patterns and texts that `re` and `regex` read differently."""
COMPILED = """
import resource, sys
getattr(__import__(sys.argv[1]), "compile")(sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""

POWERS = "9^9^9^9^9"

RESPONSES = 64
CALLS = 100
STARTS = 5
DEADLINE_S = 2.0
SETTLED_S = 3.0
"""How long after a kill what is left is counted."""
ORPHAN = "86391"
"""Seconds of a `sleep` whose parent has ended, by which it is found."""
CHILD = "86392"
"""The same of a child."""
FUNCTIONS = f'''
import os, subprocess, time

def fast(responses):
    return [float(len(response)) for response in responses]

def stuck(responses):
    subprocess.Popen("sleep {ORPHAN} & exec true", shell=True, start_new_session=True).wait()
    subprocess.Popen(["sleep", "{CHILD}"])
    time.sleep(600)

class Answer:
    def __reduce__(self):
        return os.getpid, ()
'''


def compare_regex() -> None:
    """Print what `regex` reads differently, what it needs to compile, and when its deadline passes."""
    import regex

    for pattern, text in DIFFERENT:
        print(f"{pattern!r} in {text!r}: re {_found(re, pattern, text)}, regex {_found(regex, pattern, text)}")
    for name in (r"\w", r"\d", r"\s"):
        ours, theirs = re.compile(name), regex.compile(name)
        differ = sum((ours.match(chr(i)) is None) != (theirs.match(chr(i)) is None) for i in range(sys.maxunicode + 1))
        print(f"{name}: {differ} characters differ")
    for module in ("re", "regex"):
        peak = subprocess.run([sys.executable, "-c", COMPILED, module, NESTED], check=True, capture_output=True)
        print(f"{module} compiles {NESTED}: {int(peak.stdout)} MiB at most, with the interpreter")
    for threads in (0, 1, 3):
        with _busy(threads):
            began, worked = time.monotonic(), time.thread_time()
            with suppress(TimeoutError):
                regex.search(EXPONENTIAL, "a" * 80 + "b", timeout=2.0, concurrent=True)
            print(f"timeout=2 beside {threads} busy threads: after {time.thread_time() - worked:.2f} s of the match's "
                  f"own CPU time, {time.monotonic() - began:.2f} s by the clock")


def _found(module: Any, pattern: str, text: str) -> str:
    try:
        match = module.search(pattern, text)
    except module.error as error:
        return f"refuses it ({error})"
    return "finds nothing" if match is None else f"finds {match[0]!r}"


@contextmanager
def _busy(threads: int) -> Iterator[None]:
    """Threads that compute without Python's lock, as torch's do."""
    over = threading.Event()

    def work() -> None:
        data = bytes(1 << 24)
        while not over.is_set():
            hashlib.sha256(data)

    started = [threading.Thread(target=work) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in started:
            thread.join()


def compare_actor() -> None:
    """Print what a reward function's process and a Ray actor cost, and what is left of a function that was killed."""
    import ray

    with tempfile.TemporaryDirectory(prefix="rr-") as place:
        Path(place, "reward_functions.py").write_text(FUNCTIONS)
        path = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        os.environ["PYTHONPATH"] = path
        sys.path.insert(0, place)
        asyncio.run(_of_process(place))
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20,
                 _temp_dir=f"{place}/ray", runtime_env={"env_vars": {"PYTHONPATH": path}})
        try:
            asyncio.run(_of_actor())
        finally:
            ray.shutdown()


async def _of_process(place: str) -> None:
    from rlhf_ray.rewards.function_source import KillableFunction

    def made(name: str) -> KillableFunction:
        return KillableFunction("it", f"{place}/reward_functions.py:{name}", ["responses"], DEADLINE_S)

    responses = {"responses": ["r" * 4000] * RESPONSES}
    samples = ["a sample"] * RESPONSES
    starts = []
    for number in range(STARTS):
        began = time.perf_counter()
        function = made("fast")
        await function.call(responses, samples)
        starts.append(time.perf_counter() - began)
        if number < STARTS - 1:
            await function.stop()
    calls = [await _timed(function.call, responses, samples) for _ in range(CALLS)]
    assert function.pid is not None
    keeper = psutil.Process(function.pid)
    memory = sum(each.memory_info().rss for each in (keeper, *keeper.children()))
    await function.stop()
    _print("our process", starts, calls, memory)
    function = made("stuck")
    await function.start()
    with suppress(Exception):
        await function.call(responses, samples)
    await asyncio.sleep(SETTLED_S)
    print(f"our process: left after a kill: {_left()}")


class FunctionActor:
    """A reward function as a Ray actor would hold it."""

    def __init__(self, name: str) -> None:
        import reward_functions  # type: ignore[import-not-found]

        self._function = getattr(reward_functions, name)

    def call(self, responses: list[str]) -> Any:
        return self._function(responses)

    def answer(self) -> Any:
        import reward_functions

        return reward_functions.Answer()

    def pid(self) -> int:
        return os.getpid()


async def _of_actor() -> None:
    import ray

    remote_class: Any = ray.remote(num_cpus=0)(FunctionActor)
    responses = ["r" * 4000] * RESPONSES
    starts = []
    for number in range(STARTS):
        began = time.perf_counter()
        actor = remote_class.remote("fast")
        await actor.call.remote(responses)
        starts.append(time.perf_counter() - began)
        if number < STARTS - 1:
            ray.kill(actor)
    calls = [await _timed(actor.call.remote, responses) for _ in range(CALLS)]
    _print("Ray actor", starts, calls, psutil.Process(await actor.pid.remote()).memory_info().rss)
    print(f"Ray actor: its answer calls a function in this process: {await actor.answer.remote() == os.getpid()}")
    ray.kill(actor)
    actor = remote_class.remote("stuck")
    await actor.pid.remote()
    answer = asyncio.ensure_future(_awaited(actor.call.remote(responses)))
    await asyncio.wait((answer,), timeout=DEADLINE_S)
    ray.kill(actor)
    await asyncio.gather(answer, return_exceptions=True)
    await asyncio.sleep(SETTLED_S)
    print(f"Ray actor: left after a kill: {_left()}")


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


async def _timed(call: Callable[..., Awaitable[Any]], *arguments: Any) -> float:
    began = time.perf_counter()
    await call(*arguments)
    return time.perf_counter() - began


def _print(what: str, starts: list[float], calls: list[float], memory: int) -> None:
    print(f"{what}: {1e3 * median(starts):.0f} ms from the start to the first scores, {1e3 * median(calls):.1f} ms a "
          f"call, {memory / 2**20:.0f} MiB")


def _left() -> str:
    """What is left of what `stuck` has started; it is killed."""
    kinds = {ORPHAN: "an orphan", CHILD: "a child"}
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if len(command) == 2 and command[1] in kinds:
            found.append(kinds[command[1]])
            process.kill()
    return ", ".join(found) or "nothing"


def compare_numbers() -> None:
    """Print how math-verify reads the texts of the tests of the reward `number`."""
    from math_verify import parse, verify  # type: ignore[import-not-found]

    from tests.unit.rewards import test_rules

    def right(text: str, answer: str) -> bool:
        return bool(verify(parse(answer), parse(text)))

    parts = _cases(test_rules.test_a_number_that_is_a_part_of_something_is_not_read)
    taken = [text for text in parts if any(right(text, part) for part in re.findall(r"\d+(?:\.\d+)?", text))]
    print(f"a part is taken for the number in {len(taken)} of {len(parts)} texts: {taken}")
    numbers = [(text, number) for text, number in _cases(test_rules.test_the_last_number_of_a_text)
               if number is not None]
    missed = [text for text, number in numbers if not right(text, number)]
    print(f"not read: {len(missed)} of {len(numbers)} numbers: {missed}")
    began = time.perf_counter()
    right(POWERS, "1")
    print(f"{POWERS}: {time.perf_counter() - began:.1f} s")


def _cases(test: Any) -> list[Any]:
    """The cases that a test is parametrised with."""
    return list(next(mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"))


if __name__ == "__main__":
    comparisons = {"regex": compare_regex, "actor": compare_actor, "numbers": compare_numbers}
    if len(sys.argv) != 2 or sys.argv[1] not in comparisons:
        sys.exit(f"usage: python -m benchmarks.libraries {{{','.join(comparisons)}}}")
    print(cpu_name())
    comparisons[sys.argv[1]]()
