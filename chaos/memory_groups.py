"""Control groups that limit the memory of one process: the kernel kills it when it needs more (root, cgroup v1 or v2).

Memory that the process has already stays charged to its former group, so a small limit concerns only what it gets from
then on.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

NEW_BYTES = 256 * 1024
"""What a process may get in its new group."""
REMOVE_S = 5.0
POLL_S = 0.05


class MemoryGroup:
    """A group of its own for one process."""

    def __init__(self, path: Path) -> None:
        """`path` is that of a group that exists."""
        self.path = path

    @classmethod
    def make(cls) -> MemoryGroup:
        """Make an empty group with a limit of NEW_BYTES.

        Raises:
            OSError: this requires root, and control groups with a memory controller that may be written.
        """
        group = cls(_parent() / f"chaos-{uuid4().hex[:12]}")
        group.path.mkdir()
        try:
            (group.path / ("memory.max" if group._unified else "memory.limit_in_bytes")).write_text(str(NEW_BYTES))
        except OSError:
            group.path.rmdir()
            raise
        return group

    def take(self, pid: int) -> None:
        """Move a process into the group.

        Raises:
            OSError: it is gone.
        """
        (self.path / "cgroup.procs").write_text(str(pid))

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed because of the limit."""
        text = (self.path / ("memory.events" if self._unified else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def remove(self) -> None:
        """Remove the group; its processes, if there are any left, go back to the parent, where they have no limit."""
        until = time.monotonic() + REMOVE_S
        while self.path.exists() and time.monotonic() < until:
            for pid in (self.path / "cgroup.procs").read_text().split():
                with suppress(OSError):  # it has just ended
                    (self.path.parent / "cgroup.procs").write_text(pid)
            with suppress(OSError):  # a process that was killed is in it until its memory is freed
                self.path.rmdir()
            time.sleep(POLL_S)

    @property
    def _unified(self) -> bool:
        return (self.path / "memory.events").exists()


def _parent() -> Path:
    """Where groups with a memory limit can be made: the root of the hierarchy.

    Raises:
        OSError: there is none.
    """
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(place)
        if kind == "cgroup2" and "memory" in Path(place, "cgroup.subtree_control").read_text().split():
            return Path(place)
    raise OSError("no hierarchy of control groups has a memory controller")


def probe() -> str | None:
    """Try to make a group; returns why that is not possible, None if it is."""
    try:
        MemoryGroup.make().remove()
    except OSError as error:
        return str(error)
    return None
