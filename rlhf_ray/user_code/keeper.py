"""The keeper of a process of user code, so that nothing of it is left: it starts the process, adopts whatever that
starts, and kills all of it when the process has ended, when it is told to end, or when the process that started the
keeper has died. It also gives the process a directory for files, and removes it at the end.

Started as a program, with a module, the number of an open socket and the id of the process that starts it as arguments.
Its child calls the module's `main` with that socket. It imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TOLD = {signal.SIGTERM, signal.SIGCHLD}
PATIENCE_S = 3.0
"""Time to kill what user code has started; what belongs to another user cannot be killed."""
LOOK_S = 0.005
SOCKET = 3
"""The child's number of the socket, whatever the parent's was: user code that closes "all" files often stops at some
number."""
SCRATCH = "RLHF_RAY_SCRATCH"
"""Variable of the environment with the directory for files."""


def main(module: str, descriptor: int, parent: int) -> None:
    """Start the module in a child process, wait for its end, and end as it did."""
    prctl = ctypes.CDLL(None).prctl
    signal.pthread_sigmask(signal.SIG_BLOCK, TOLD)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # an orphan below this process becomes its child
    if os.getppid() != parent:
        return
    keeper = os.getpid()
    scratch = tempfile.mkdtemp(prefix="rlhf-ray-")
    os.environ[SCRATCH] = scratch
    child = os.fork()
    if child == 0:
        os.setsid()  # user code that kills its process group does not kill its keeper
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TOLD)
        if os.getppid() == keeper:
            if descriptor != SOCKET:
                os.dup2(descriptor, SOCKET)
                os.close(descriptor)
            importlib.import_module(module).main(SOCKET)
        return
    _close_files()
    status = _kept(child)
    shutil.rmtree(scratch, ignore_errors=True)
    _end_as(status)


def _close_files() -> None:
    """Close the socket and the output, whose ends tell that the user's code has ended."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(nothing, number)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _kept(child: int) -> int:
    """Wait until the child has ended or is to end, and kill everything; returns the child's status."""
    ended: dict[int, int] = {}
    while child not in ended and signal.sigwait(TOLD) != signal.SIGTERM:
        reap(ended)
    deadline = time.monotonic() + PATIENCE_S
    while reap(ended) and time.monotonic() < deadline:
        for pid in children():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)
    return ended.get(child, signal.SIGKILL)


def reap(ended: dict[int, int]) -> bool:
    """Note the children that have ended, with their statuses. Returns whether others are left: as everything below this
    process becomes its child, none is left then at all."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        ended[pid] = status


def children() -> list[int]:
    """The children of this process."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(each.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(each.parent.name))
    return found


def _end_as(status: int) -> None:
    """End this process in the same way as another one."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
