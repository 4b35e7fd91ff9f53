"""Whether a process has ended."""

import os


def gone(pid: int) -> bool:
    """Whether a process has ended, or is killed and waits to be noticed."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True
