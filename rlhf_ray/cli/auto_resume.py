"""`run.auto_resume`: a run that died is started again with --resume, by a small parent process that does nothing else.

The parent loads no model and joins no cluster, so what kills a run hardly reaches it. It works the same in a terminal,
under a scheduler and as the entry point of a Ray job.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_ray.checkpoint.directory import CheckpointStore
from rlhf_ray.coordinator.stop import CHILD
from rlhf_ray.errors import RunInterrupted, WorkerError
from rlhf_ray.observability.faults import STARTED_AGAIN

MAIN = (sys.executable, "-m", "rlhf_ray.cli.main")
STOP = (signal.SIGINT, signal.SIGTERM)


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
        return self.code < 0 or self.code == WorkerError.exit_code

    def how(self) -> str:
        """How it ended, in words."""
        return f"died of {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with exit code {self.code}"

    def loss(self) -> dict[str, Any]:
        """What the next start is told of this one's end, just after it (see `observability.faults.note_restart`)."""
        return {"pid": self.pid, "kind": "died" if self.code < 0 else "failed", "reason": f"the run {self.how()}",
                "lost_at": round(time.time(), 3)}


def run_and_resume(command: Sequence[str], store: CheckpointStore, resume: bool) -> int:
    """Run `rlhf-ray COMMAND`, and again with --resume as long as it dies and has made a checkpoint since.

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
        if newest is None or newest == before:
            _say(f"the run {child.how()} and has made no checkpoint since it was started: it is not started again "
                 "(run.auto_resume)")
            return child.exit_code
        _say(f"the run {child.how()}; it is started again and goes on from the checkpoint of step {newest[0]} "
             "(run.auto_resume)")
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


def _stop_with_parent() -> None:
    """Have the system send SIGTERM to this process when its parent dies (prctl's PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
