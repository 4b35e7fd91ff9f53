"""The processes that a process has started."""

import psutil


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Children and their children that are alive, without Python's resource trackers, which live as long as the process
    and clean up after killed ones."""
    return [child for child in process.children(recursive=True) if _counts(child)]


def _counts(process: psutil.Process) -> bool:
    try:
        return not any("resource_tracker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:  # it has ended meanwhile, or is a zombie
        return False
