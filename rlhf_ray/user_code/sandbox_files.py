"""The files of the programs in a sandbox: a directory for each, how large it is, and its removal. Imports the standard
library alone."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "rlhf-ray-sandbox-"
"""How the names of what a sandbox makes outside begin."""
OLD_S = 60.0
"""Age from which a directory without a lock is one that was left."""
BLOCK = 4096
"""Bytes that a file takes at least, the empty one too: its place in a directory."""


class Base:
    """The directory of this worker, in which each program has its own. It is locked: another worker removes one whose
    worker was killed."""

    def __init__(self) -> None:
        for other in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                facts = other.lstat()
                old = stat.S_ISDIR(facts.st_mode) and time.time() - facts.st_ctime > OLD_S
                if old and facts.st_uid == os.getuid() and (lock := _lock(str(other))) is not None:
                    remove(str(other))
                    os.close(lock)
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        os.chmod(self.path, 0o711)  # noqa: S103 - the users of programs pass it, and cannot list it
        self._lock = _lock(self.path)

    def directory(self, user: int | None) -> str:
        """A new empty directory that belongs to this user."""
        path = f"{self.path}/{secrets.token_hex(4)}"
        os.mkdir(path, 0o700)
        if user is not None:
            os.chown(path, user, user)
        return path

    def remove(self) -> None:
        """Remove it with all that is in it."""
        remove(self.path)


def _lock(directory: str) -> int | None:
    """A descriptor of a directory that is locked while it is open; None if another process has the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


def size_of(directory: str, enough: int) -> int:
    """Bytes of the files below a directory, each at least a block; a directory that cannot be read, such as one below
    too many others, counts as too large. It stops when it has found more than `enough`."""
    found, places = 0, [directory]
    while places and found <= enough:
        try:
            with os.scandir(places.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        facts = entry.stat(follow_symlinks=False)
                        found += max(BLOCK, facts.st_blocks * 512)
                        if stat.S_ISDIR(facts.st_mode):
                            places.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return enough + 1
    return found


def nameless(pid: int) -> int:
    """Bytes of the files that a process has open and that have no name any more."""
    found = {}
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                facts = os.stat(f"/proc/{pid}/fd/{number}")
                if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0:
                    found[facts.st_ino] = facts.st_blocks * 512
    return sum(found.values())


def remove(directory: str) -> None:
    """Remove a directory whose processes have ended, however deep: the directories in it are moved to its top first."""
    os.chmod(directory, 0o700)
    moved, more = 0, True
    while more:
        more = False
        for name in os.listdir(directory):
            path = f"{directory}/{name}"
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                below = f"{path}/{inner}"
                if stat.S_ISDIR(os.lstat(below).st_mode):
                    os.chmod(below, 0o700)  # a directory is moved by who may write to it
                    moved += 1
                    os.rename(below, f"{directory}/.moved-{secrets.token_hex(4)}-{moved}")
                    more = True
                else:
                    os.unlink(below)
            os.rmdir(path)
    shutil.rmtree(directory, ignore_errors=True)
