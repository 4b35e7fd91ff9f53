"""`run.auto_resume`: a run that died is started again with --resume, by a small parent process that does nothing else.

The parent loads no model and joins no cluster, so what kills a run hardly reaches it. It works the same in a terminal,
under a scheduler and as the entry point of a Ray job.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator.stop import CHILD
from rlhf_ray.errors import ClusterUnavailable, RunInterrupted, WorkerError
from rlhf_ray.observability.faults import STARTED_AGAIN

MAIN = (sys.executable, "-m", "rlhf_ray.cli.main")
STOP = (signal.SIGINT, signal.SIGTERM)
MAY_BE_OVER = (WorkerError.exit_code, ClusterUnavailable.exit_code)
"""Exit codes of errors after which another start may succeed."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""Seconds between two tries to reach a lost cluster: the first, doubled each time, and the longest."""


def is_child() -> bool:
    """Whether this process was started by such a parent."""
    return CHILD in os.environ


@dataclass
class Child:
    """A run as a process of its own."""

    code: int
    """As `subprocess.Popen.returncode`: minus the signal's number for one that died of a signal."""
    asked: bool
    """Whether the parent was asked to stop, and passed it on."""
    pid: int = 0

    @property
    def exit_code(self) -> int:
        """What the parent's own exit code is to be: 128 plus the signal's number, as in a shell."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def may_go_on(self) -> bool:
        """Whether starting again may help: it died of a signal that asks nobody to stop, or says so itself."""
        if self.asked or self.code in (0, RunInterrupted.exit_code, *(-number for number in STOP)):
            return False
        return self.code < 0 or self.code in MAY_BE_OVER

    def how(self) -> str:
        """How it ended, in words."""
        if self.code == ClusterUnavailable.exit_code:
            return f"lost its Ray cluster, or could not connect to it (exit code {self.code})"
        return f"died of {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with exit code {self.code}"

    def loss(self) -> dict[str, Any]:
        """What the next start is told of this one's end, just after it (see `observability.faults.note_restart`)."""
        return {"pid": self.pid, "kind": "died" if self.code < 0 else "failed", "reason": f"the run {self.how()}",
                "lost_at": round(time.time(), 3)}


class Outage:
    """The time without the cluster that a run joins, since the last checkpoint that was made."""

    def __init__(self, config: ClusterConfig, answers: Callable[[str], bool],
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`answers`: whether somebody takes connections at an address."""
        self._address, self._bound_s = config.address, config.start_timeout_s
        self._answers, self._clock = answers, clock
        self._waited_s, self._pause_s = 0.0, FIRST_S

    def over(self) -> None:
        """The run went on."""
        self._waited_s, self._pause_s = 0.0, FIRST_S

    def ended(self, child: Child) -> bool:
        """Whether the child ended for want of the cluster. One that it started itself is started anew with it."""
        if not self._address:
            return False
        return child.code == ClusterUnavailable.exit_code or not self._answers(self._address)

    def waited(self, child: Child) -> bool:
        """Wait until the address answers again; False when it does not in time, or at a request to stop."""
        while (left := self._bound_s - self._waited_s) > 0:
            began, pause_s = self._clock(), min(self._pause_s, left)
            self._pause_s = min(2 * self._pause_s, LONGEST_S)
            _say(f"the run {child.how()}; {self._address} is tried again in {pause_s:g} s, and for at most {left:.0f} "
                 f"s (run.auto_resume, cluster.start_timeout_s={self._bound_s:g})")
            if _pause(pause_s):
                _say("asked to stop while waiting for the cluster; --resume goes on from the last checkpoint")
                child.code = RunInterrupted.exit_code
                return False
            there = self._answers(str(self._address))
            self._waited_s += self._clock() - began
            if there:
                return True
        _say(f"the run {child.how()}, and the cluster did not answer within cluster.start_timeout_s="
             f"{self._bound_s:g} s: it is not started again (run.auto_resume)")
        return False


def run_and_resume(command: Sequence[str], store: CheckpointStore, resume: bool, outage: Outage) -> int:
    """Run `rlhf-ray COMMAND`, and again with --resume as long as it dies and has made a checkpoint since. While the
    cluster that it joins does not answer, wait for it.

    Args:
        store: of the run.
        resume: whether to pass --resume the first time, too.

    Returns:
        the exit code for this process.
    """
    loss: Mapping[str, Any] | None = None
    while True:
        before = store.newest_name()
        child = _run([*command, *(["--resume"] if resume else [])], loss)
        if not child.may_go_on:
            return child.exit_code
        newest = store.newest_name()
        if went_on := newest is not None and newest != before:
            outage.over()
        if outage.ended(child):
            if not outage.waited(child):
                return child.exit_code
        elif not went_on:
            _say(f"the run {child.how()} and has made no checkpoint since it was started: it is not started again "
                 "(run.auto_resume)")
            return child.exit_code
        where = f"goes on from the checkpoint of step {newest[0]}" if newest else "begins anew"
        _say(f"the run {child.how()}; it is started again and {where} (run.auto_resume)")
        resume, loss = True, child.loss()


def _run(arguments: Sequence[str], loss: Mapping[str, Any] | None = None) -> Child:
    """Run the command line to its end; `loss` is that of the start before.

    Requests to stop are passed on, each once: the child is in a process group of its own, so that none reaches it by
    two ways (but where Ray stops a job: see `coordinator.stop`). It is asked to stop, too, when this process dies.
    """
    told = {} if loss is None else {STARTED_AGAIN: json.dumps(loss)}
    process = subprocess.Popen(
        [*MAIN, *arguments], env={**os.environ, CHILD: "1", **told}, process_group=0,
        preexec_fn=_stop_with_parent if sys.platform == "linux" else None,
    )
    with _passing_on(process) as asked:
        code = process.wait()
    return Child(code, bool(asked), process.pid)


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass requests to stop on to the process meanwhile; yields the list of those that came."""
    asked: list[int] = []

    def pass_on(number: int, _: object) -> None:
        asked.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in STOP}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pause(seconds: float) -> bool:
    """Wait, unless asked to stop meanwhile; whether it was. (A pipe, since a handler that takes a lock, as that of an
    event, may run in the moment in which this thread holds it.)"""
    heard, told = os.pipe()
    before = {number: signal.signal(number, lambda *_: os.write(told, b".")) for number in STOP}
    try:
        return bool(select.select((heard,), (), (), seconds)[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(heard)
        os.close(told)


def _stop_with_parent() -> None:
    """Have the system send SIGTERM to this process when its parent dies (prctl's PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
