"""Runs of pytest in forks of one process that has torch and the like imported already.

A fork imports the copy of the repository that it is pointed at, and nothing of the checkout: the server itself never
imports `rlhf_ray`. It leads a process group of its own, which is killed when it ends or its time is up.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MEMORY_BYTES = 24 * 2**30  # of address space: a mutant that allocates without end fails, and the machine does not
FILE_BYTES = 2 * 2**30
FAULT = 70  # exit status of a fork whose work itself raised an error
PROJECT = ("rlhf_ray", "tests", "benchmarks", "chaos")
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--no-header")


@dataclass
class Run:
    """One fork: what it works on, and when it is killed."""

    job: Any
    slot: int
    pid: int
    started: float
    deadline: float


@dataclass(frozen=True)
class Ended:
    """How a fork ended: with an `answer`, by a crash, or because its time was up."""

    job: Any
    slot: int
    seconds: float
    answer: Any
    crashed: bool
    timed_out: bool


class ForkServer:
    """Runs `work(job, slot)` in forks, at most `slots` at once; `slot` is 0 to slots - 1."""

    def __init__(self, scratch: Path, slots: int) -> None:
        self.scratch = scratch
        self.slots = slots
        self._running: list[Run] = []

    def map(
        self, jobs: Iterable[Any], work: Callable[[Any, int], Any], limit_s: Callable[[Any], float],
    ) -> Iterator[Ended]:
        """Yields each job's end as it comes; `work` answers with what JSON can hold.

        Raises:
            RuntimeError: `work` itself failed.
        """
        waiting, free = iter(jobs), list(range(self.slots))
        more = True
        try:
            while more or self._running:
                while more and free:
                    job = next(waiting, None)
                    if job is None:
                        more = False
                    else:
                        self._running.append(self._start(job, free.pop(), work, limit_s(job)))
                for ended in self._collect():
                    free.append(ended.slot)
                    yield ended
                time.sleep(0.02)
        finally:
            for run in self._running:
                _kill_group(run.pid)

    def _start(self, job: Any, slot: int, work: Callable[[Any, int], Any], limit_s: float) -> Run:
        self._answer(slot).unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        now = time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = FAULT
            try:
                os.setsid()
                _limit(resource.RLIMIT_AS, MEMORY_BYTES)
                _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
                with open(self.scratch / f"output-{slot}.txt", "wb") as output:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                self._answer(slot).write_text(json.dumps(work(job, slot)))
                code = 0
            except BaseException:
                (self.scratch / f"output-{slot}.txt").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        return Run(job, slot, pid, now, now + limit_s)

    def _collect(self) -> list[Ended]:
        done = []
        for run in list(self._running):
            ended, status = os.waitpid(run.pid, os.WNOHANG)
            timed_out = not ended and time.monotonic() > run.deadline
            if not ended and not timed_out:
                continue
            _kill_group(run.pid)
            if timed_out:
                os.waitpid(run.pid, 0)
            file = self._answer(run.slot)
            if ended and os.WIFEXITED(status) and os.WEXITSTATUS(status) == FAULT:
                output = (self.scratch / f"output-{run.slot}.txt").read_text(errors="replace")
                raise RuntimeError(f"a fork failed at {run.job!s:.200}:\n{output[-4000:]}")
            crashed = not timed_out and (status != 0 or not file.exists())
            answer = None if crashed or timed_out else json.loads(file.read_text())
            done.append(Ended(run.job, run.slot, time.monotonic() - run.started, answer, crashed, timed_out))
            self._running.remove(run)
        return done

    def _answer(self, slot: int) -> Path:
        return self.scratch / f"answer-{slot}.json"


class InOrder:
    """pytest plugin: runs the tests named, in that order, and no others; names the one that failed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._place = {name: place for place, name in enumerate(names)}
        self.failed: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(wanted, key=lambda item: self._place[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.failed is None:
            self.failed = f"collecting {report.nodeid}"


def enter(copy: Path, temporary: Path) -> None:
    """In a fork: imports come from `copy`, files of tests go to `temporary`."""
    os.chdir(copy)
    temporary.mkdir(parents=True, exist_ok=True)
    os.environ.update(PYTHONPATH=str(copy), TMPDIR=str(temporary), PYTHONDONTWRITEBYTECODE="1",
                      HYPOTHESIS_STORAGE_DIRECTORY=str(temporary / "hypothesis"))
    sys.dont_write_bytecode = True
    checkout = {"", str(Path(__file__).parents[2])}
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in checkout)]
    for name in [name for name in sys.modules if name.split(".")[0] in PROJECT]:
        del sys.modules[name]


def run_tests(batches: Sequence[Sequence[str]], temporary: Path, test_limit_s: float) -> str | None:
    """Runs each batch until a test fails; returns that test's name, None when all pass."""
    for batch in batches:
        order = InOrder(batch)
        files = list(dict.fromkeys(name.split("::")[0] for name in batch))
        options = [*OPTIONS, f"--basetemp={temporary / 'pytest'}", f"--timeout={test_limit_s:.0f}"]
        code = pytest.main([*options, *files], plugins=[order])
        if order.failed or code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return order.failed or f"pytest ended with {code!s}"
    return None


def import_others(names: Iterable[str]) -> None:
    """Imports modules of other projects; one that cannot be is left to who needs it."""
    for name in names:
        if name.split(".")[0] not in PROJECT:
            with contextlib.suppress(BaseException):
                importlib.import_module(name)


def _limit(which: int, value: int) -> None:
    resource.setrlimit(which, (value, resource.getrlimit(which)[1]))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
