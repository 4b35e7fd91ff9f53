"""What a kind of fault requires of the machine. Each requirement is probed by doing it once: a container may be root
and have no capability, or have a device file that it may not open.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROBE_S = 20.0
"""Longest time that one command of a probe may take."""


@dataclass(frozen=True)
class Requirement:
    """Something that a machine may not have."""

    name: str
    probe: Callable[[], str | None]
    """Tries it; returns None if it works, otherwise why not."""

    def missing(self) -> str | None:
        """Why it is not available here; None if it is. Tried once in a process."""
        return _reason(self)


@cache
def _reason(requirement: Requirement) -> str | None:
    try:
        problem = requirement.probe()
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(error)
    return problem and f"{requirement.name}: {problem}"


def first_missing(requirements: Iterable[Requirement]) -> str | None:
    """Why the first requirement that is not met is not; None if all are."""
    return next((reason for requirement in requirements if (reason := requirement.missing())), None)


def failed(*commands: Sequence[str]) -> str | None:
    """Run commands one after the other; returns the first error message, None if all succeed."""
    for command in commands:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=PROBE_S)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            return ": ".join([f"`{' '.join(command)}` failed with exit code {done.returncode}", *last])
    return None


def _mount_a_file_system() -> str | None:
    if os.geteuid():
        return "this requires root"
    with tempfile.TemporaryDirectory() as directory:
        return failed(("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory), ("umount", directory))


def _network_namespace() -> str | None:
    return failed(("unshare", "--net", "ip", "link", "set", "lo", "up"))


def lose_packets(link: str, share: float) -> list[str]:
    """The command that lets a network link drop a share of its packets, in this process's network namespace."""
    return ["unshare", "--mount", sys.executable, "-m", "chaos.packet_loss", link, str(share)]


def _drop_packets() -> str | None:
    return failed(("unshare", "--net", *lose_packets("lo", 0.5)))


def _compile_a_library() -> str | None:
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.c")
        source.write_text("int probe(void) { return 0; }\n")
        return failed(("cc", "-shared", "-fPIC", "-o", str(source.with_suffix(".so")), str(source)))


MOUNTS = Requirement("mounting a file system", _mount_a_file_system)
NETWORK_NAMESPACES = Requirement("a network namespace of its own", _network_namespace)
PACKET_LOSS = Requirement("dropping packets of a network namespace", _drop_packets)
COMPILER = Requirement("a C compiler", _compile_a_library)
