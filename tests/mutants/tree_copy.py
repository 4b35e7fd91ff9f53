"""Temporary copies of the repository, in each of which one file at a time is mutated."""

import compileall
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from py_compile import PycInvalidationMode


class TreeCopy:
    """The files `names` of a checkout in the folder `path`."""

    def __init__(self, checkout: Path, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self._checkout = checkout
        self._stats = {name: _stat(path / name) for name in names}

    def mutate(self, name: str, source: str) -> None:
        (self.path / name).write_text(source, encoding="utf-8")

    def restore(self) -> list[str]:
        """Undoes a mutation and what its tests changed in the copied files; returns the names restored."""
        changed = [name for name, stat in self._stats.items() if stat != _stat(self.path / name)]
        for name in changed:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._checkout / name, self.path / name)
            self._stats[name] = _stat(self.path / name)
        return changed


def copies_of(checkout: Path, targets: Sequence[Path]) -> list[TreeCopy]:
    """Copies of what git tracks, and of new files that it does not ignore.

    The modules in them have bytecode that Python checks against the source's hash rather than its time: it never takes
    one mutant's for that of another which was written in the same second.
    """
    listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=checkout, check=True,
                            capture_output=True, text=True)
    names = [name for name in listed.stdout.split("\0") if name and (checkout / name).is_file()]
    first = targets[0]
    for name in names:
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(checkout / name, first / name)
    compileall.compile_dir(first, quiet=2, workers=len(targets), invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    for target in targets[1:]:
        shutil.copytree(first, target)
    return [TreeCopy(checkout, target, names) for target in targets]


def _stat(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
