"""A user and a cgroup that the programs of one worker have for themselves. Imports the standard library alone."""

from __future__ import annotations

import os
import pwd
import random
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from rlhf_ray.user_code import sandbox_kernel as kernel
from rlhf_ray.user_code.sandbox_files import PREFIX

UIDS = range(61184, 65520)
"""Users that exist as long as a process: systemd's range for them (DynamicUser), which is within the 65,536 of most
containers."""


class Broken(Exception):
    """The sandbox cannot hold a program, or lost hold of one."""


class User:
    """A user that nobody else has, as long as this process lives."""

    def __init__(self) -> None:
        """
        Raises:
            Broken: all are taken.
        """
        known = {each.pw_uid for each in pwd.getpwall()} | _running_users()
        candidates = [each for each in UIDS if each not in known]
        random.SystemRandom().shuffle(candidates)
        for number in candidates:
            self._claim = socket.socket(socket.AF_UNIX)
            with suppress(OSError):
                self._claim.bind(f"\0{PREFIX}{number}")  # the kernel gives a name to one process only
                self.number = number
                return
            self._claim.close()
        raise Broken(f"no free user is left of {UIDS.start} to {UIDS.stop - 1}")

    def become(self, *, keeps: bool) -> None:
        """Be this user, in this process.

        Args:
            keeps: capabilities until they are set anew.
        """
        if keeps:
            kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(self.number, self.number, self.number)
        os.setresuid(self.number, self.number, self.number)

    def kill_all(self) -> None:
        """Kill all processes of this user: those that are being started, too."""
        self.signal_all(signal.SIGKILL)

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of this user: those that are being started, too."""
        pid = os.fork()
        if pid == 0:
            with suppress(OSError):
                os.setresuid(self.number, self.number, self.number)
                os.kill(-1, number)
            os._exit(0)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)

    def processes(self) -> list[int]:
        """Their ids."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if each.stat().st_uid == self.number:
                    found.append(int(each.name))
        return found


def _running_users() -> set[int]:
    found = set()
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.add(each.stat().st_uid)
    return found


class ControlGroup:
    """A cgroup for the programs of this worker, of version 1 or 2, where one can be made."""

    def __init__(self, memory: int, processes: int) -> None:
        self._made: list[Path] = []
        self.missing = ""
        name = f"{PREFIX}{os.getpid()}"
        try:
            for parent, limits in self._parents(memory, processes):
                group = parent / name
                group.mkdir()
                self._made.append(group)
                for file, value in limits.items():
                    (group / file).write_text(str(value))
        except (OSError, ValueError) as error:
            self.remove()
            self.missing = f"none can be made: {error}"

    @staticmethod
    def _parents(memory: int, processes: int) -> list[tuple[Path, dict[str, int]]]:
        """(cgroup of this process, limits for one below it) of each hierarchy that is needed."""
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        paths = {name: path for _, names, path in lines for name in names.split(",")}
        root = Path("/sys/fs/cgroup")
        if "pids" in paths:
            return [(root / "pids" / paths["pids"].lstrip("/"), {"pids.max": processes}),
                    (root / "memory" / paths["memory"].lstrip("/"), {"memory.limit_in_bytes": memory})]
        return [(root / paths[""].lstrip("/"), {"pids.max": processes, "memory.max": memory})]

    def enter(self) -> None:
        """Put this process into it."""
        for group in self._made:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove it, when nothing runs in it any more."""
        for group in self._made:
            deadline = time.monotonic() + 1.0
            while group.exists() and time.monotonic() < deadline:
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.01)
        self._made = []
