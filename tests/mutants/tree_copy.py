"""Temporary copies of the repository, in each of which one file at a time is mutated."""

import compileall
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from py_compile import PycInvalidationMode


class TreeCopy:
    """The files `names` in the folder `path`, as they are in the folder `original`, which nobody edits meanwhile."""

    def __init__(self, original: Path, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self._original = original
        self._stats = {name: _stat(path / name) for name in names}

    def mutate(self, name: str, source: str) -> None:
        (self.path / name).write_text(source, encoding="utf-8")

    def restore(self) -> list[str]:
        """Undoes a mutation and what its tests changed in the copied files; returns the names restored."""
        changed = [name for name, stat in self._stats.items() if stat != _stat(self.path / name)]
        for name in changed:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._original / name, self.path / name)
            self._stats[name] = _stat(self.path / name)
        return changed


def copies_of(checkout: Path, folder: Path, count: int) -> list[TreeCopy]:
    """Copies, in `folder`, of what git tracks and of new files that it does not ignore; the checkout may then change.

    The modules in them have bytecode that Python checks against the source's hash rather than its time: it never takes
    one mutant's for that of another which was written in the same second.
    """
    listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=checkout, check=True,
                            capture_output=True, text=True)
    names = [name for name in listed.stdout.split("\0") if name and (checkout / name).is_file()]
    original = folder / "original"
    for name in names:
        (original / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(checkout / name, original / name)
    compileall.compile_dir(original, quiet=2, workers=count, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    targets = [folder / f"copy-{number}" for number in range(count)]
    for target in targets:
        shutil.copytree(original, target)
    return [TreeCopy(original, target, names) for target in targets]


def _stat(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
