"""The identity of a process, by which others can tell whether it is alive: for certain on the same machine, not at all
from another one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
_DEAD = ("Z", "X")
"""States of a process that has ended and was not reaped by its parent."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process and the place where its number means something."""

    host: str
    boot: str
    """Random id of the boot of its machine; empty where the system has none. Containers have that of their machine."""
    pid_namespace: int
    """Inode of the namespace of its number: containers of one machine number their processes apart."""
    pid: int
    started: int
    """Clock ticks from boot to its start: another process that has its number later started later."""

    @classmethod
    def own(cls) -> Self:
        """This process."""
        try:
            boot, namespace = _BOOT.read_text().strip(), os.stat(_NAMESPACE).st_ino
        except OSError:
            boot, namespace = "", 0
        return cls(socket.gethostname(), boot, namespace, os.getpid(), (_state(os.getpid()) or ("", 0))[1])

    def lives(self, seen_by: ProcessIdentity) -> bool | None:
        """Whether the process lives, stopped ones included; None where `seen_by`, who asks, cannot tell: on another
        machine or boot, or in another namespace of process numbers."""
        here = (seen_by.host, seen_by.boot, seen_by.pid_namespace)
        if not self.boot or (self.host, self.boot, self.pid_namespace) != here:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody else's, and there
            pass
        state = _state(self.pid)
        return state is None or (state[0] not in _DEAD and state[1] == self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _state(pid: int) -> tuple[str, int] | None:
    """State and start of a process, from /proc/PID/stat; None where that is hidden or missing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may hold anything
    except OSError:
        return None
    return fields[0], int(fields[19])
