"""`run.auto_resume`: a small parent process restarts a run that died with --resume.

The parent loads no model and joins no cluster, so failures of the run seldom affect it. It works in a terminal, under a
scheduler and as the entry point of a Ray job.
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
from rlhf_ray.coordinator.stop import CHILD, handle_signals, restore_handlers
from rlhf_ray.errors import ClusterUnavailable, RunInterrupted, describe_ending, is_restartable, shell_code
from rlhf_ray.observability.faults import STARTED_AGAIN

MAIN = (sys.executable, "-P", "-m", "rlhf_ray.cli.main")
FIRST_S, LONGEST_S = 1.0, 60.0
"""Seconds between two attempts to reach a lost cluster: the first pause, doubled each time, and the longest."""


def is_child() -> bool:
    """Whether this process was started by an auto-resume parent."""
    return CHILD in os.environ


@dataclass
class Child:
    """The outcome of a run in a child process."""

    code: int
    """As `subprocess.Popen.returncode`: the negative signal number if a signal killed it."""
    asked: bool
    """Whether the parent received a request to stop and forwarded it."""
    pid: int = 0

    @property
    def exit_code(self) -> int:
        """Exit code for the parent."""
        return shell_code(self.code)

    @property
    def may_go_on(self) -> bool:
        """Whether a restart may succeed: an unrequested signal killed it, or its exit code allows a restart."""
        return not self.asked and is_restartable(self.code)

    def how(self) -> str:
        """How the run ended, in words."""
        return f"died of {signal.Signals(-self.code).name}" if self.code < 0 else describe_ending(self.code)

    def loss(self) -> dict[str, Any]:
        """Record of this end for the next start, taken right after it (see `observability.faults.note_restart`)."""
        return {"pid": self.pid, "kind": "died" if self.code < 0 else "failed", "reason": f"the run {self.how()}",
                "lost_at": round(time.time(), 3)}


class Outage:
    """Time without the cluster that a run joins, since the last new checkpoint."""

    def __init__(self, config: ClusterConfig, answers: Callable[[str], bool],
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`answers`: whether an address accepts connections."""
        self._address, self._bound_s = config.address, config.start_timeout_s
        self._answers, self._clock = answers, clock
        self._waited_s, self._pause_s = 0.0, FIRST_S

    def over(self) -> None:
        """Reset the waiting time, because the run made progress."""
        self._waited_s, self._pause_s = 0.0, FIRST_S

    def ended(self, child: Child) -> bool:
        """Whether the child ended because it lost a joined cluster. A local cluster is restarted with the run."""
        if not self._address:
            return False
        return child.code == ClusterUnavailable.exit_code or not self._answers(self._address)

    def waited(self, child: Child) -> bool:
        """Wait until the address accepts connections again; False on timeout or on a request to stop."""
        while (left := self._bound_s - self._waited_s) > 0:
            began, pause_s = self._clock(), min(self._pause_s, left)
            self._pause_s = min(2 * self._pause_s, LONGEST_S)
            _say(f"the run {child.how()}; trying {self._address} again in {pause_s:g} s, for at most {left:.0f} s "
                 f"(run.auto_resume, cluster.start_timeout_s={self._bound_s:g})")
            if _pause(pause_s):
                _say("stopped while waiting for the cluster; use --resume to continue from the last checkpoint")
                child.code = RunInterrupted.exit_code
                return False
            there = self._answers(str(self._address))
            self._waited_s += self._clock() - began
            if there:
                return True
        _say(f"the run {child.how()}, and the cluster did not respond within cluster.start_timeout_s="
             f"{self._bound_s:g} s: the run is not restarted (run.auto_resume)")
        return False


def run_and_resume(command: Sequence[str], store: CheckpointStore, resume: bool, outage: Outage) -> int:
    """Run `rlhf-ray COMMAND`, and restart it with --resume each time it dies after a new checkpoint. Wait for a lost
    cluster.

    Args:
        store: checkpoints of the run.
        resume: whether to pass --resume on the first start too.

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
            _say(f"the run {child.how()} and saved no checkpoint since its start: it is not restarted "
                 "(run.auto_resume)")
            return child.exit_code
        where = f"from the checkpoint of step {newest[0]}" if newest else "from the beginning"
        _say(f"the run {child.how()}; restarting it {where} (run.auto_resume)")
        resume, loss = True, child.loss()


def _run(arguments: Sequence[str], loss: Mapping[str, Any] | None = None) -> Child:
    """Run the command line to its end; `loss` is that of the previous start.

    Requests to stop are forwarded once each: the child has its own process group, so that none reaches it twice (except
    when Ray stops a job: see `coordinator.stop`). It receives SIGTERM if this process dies.
    """
    restart = {} if loss is None else {STARTED_AGAIN: json.dumps(loss)}
    process = subprocess.Popen(
        [*MAIN, *arguments], env={**os.environ, CHILD: "1", **restart}, process_group=0,
        preexec_fn=_stop_with_parent if sys.platform == "linux" else None,
    )
    with _forward_signals(process) as asked:
        code = process.wait()
    return Child(code, bool(asked), process.pid)


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forward requests to stop to the process; yields the list of those received."""
    asked: list[int] = []

    def forward(number: signal.Signals) -> None:
        asked.append(number)
        process.send_signal(number)

    before = handle_signals(forward)
    try:
        yield asked
    finally:
        restore_handlers(before)


def _pause(seconds: float) -> bool:
    """Wait, unless a request to stop arrives; returns whether one did. (A pipe is used because a handler that takes a
    lock, as an event does, may run while this thread holds that lock.)"""
    reader, writer = os.pipe()
    before = handle_signals(lambda _: os.write(writer, b"."))
    try:
        return bool(select.select((reader,), (), (), seconds)[0])
    finally:
        restore_handlers(before)
        os.close(reader)
        os.close(writer)


def _stop_with_parent() -> None:
    """Have the system send SIGTERM to this process when its parent dies (prctl's PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
