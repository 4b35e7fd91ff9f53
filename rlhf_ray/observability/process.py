"""Which process this is, told so that others can say whether it still lives: on the same machine for certain, from any
other machine not at all."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
_DEAD = ("Z", "X")
"""States of a process that has ended, and whose parent has not asked how."""


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
        found = _state(self.pid)
        return found is None or (found[0] not in _DEAD and found[1] == self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _state(pid: int) -> tuple[str, int] | None:
    """State and start of a process, from /proc/PID/stat; None where that is hidden or missing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may hold anything
    except OSError:
        return None
    return fields[0], int(fields[19])
