"""Directories that appear whole or not at all: flush everything to disk, then rename."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path


def files_under(directory: Path) -> Iterator[Path]:
    """Everything in `directory` that is not a plain directory, sorted: files, and links whatever they point to."""
    for folder, names, files in os.walk(directory, followlinks=False):
        names.sort()
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        yield from (Path(folder, name) for name in sorted(files + links))


def fsync_path(path: Path) -> None:
    """Flush one file or directory to disk. Flushing a directory makes the names in it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Flush all files below `directory`, then the directories, deepest first."""
    for folder, _, files in os.walk(directory, topdown=False, followlinks=False):
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                fsync_path(path)
        fsync_path(Path(folder))


def temporary_for(final: Path) -> Path:
    """The name under which a directory is written before it becomes `final`."""
    return final.parent / f".tmp-{final.name}-{os.getpid()}"


def replace_directory(new: Path, final: Path) -> None:
    """Give the flushed directory `new` the name `final`, on the same file system.

    A name that is free is taken in one atomic rename. A directory that has it is moved aside first and removed after: a
    crash in between leaves both whole under other names and `final` absent, which `clear_leftovers` sets right.

    Raises:
        FileExistsError: `final` is not a plain directory.
    """
    aside = None
    if os.path.lexists(final):
        if final.is_symlink() or not final.is_dir():
            raise FileExistsError(f"{final} is not a plain directory; move it away")
        aside = final.parent / f".old-{final.name}-{os.getpid()}"
        os.rename(final, aside)
    os.rename(new, final)
    fsync_path(final.parent)
    if aside is not None:
        shutil.rmtree(aside)


def remove_directory(path: Path) -> None:
    """Remove a directory under another name, so that an interrupted removal does not look like a damaged directory."""
    doomed = path.parent / f".del-{path.name}-{os.getpid()}"
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def clear_leftovers(parent: Path, name: str) -> list[Path]:
    """Remove what interrupted writes, replacements and removals left in `parent`; returns the removed paths.

    Args:
        name: regular expression of the final names whose leftovers these are.
    """
    removed = []
    for path in sorted(parent.glob(".*-*-*")):
        match = re.fullmatch(rf"\.(tmp|old|del)-({name})-\d+", path.name)
        if not match or path.is_symlink() or not path.is_dir():
            continue
        final = parent / match[2]
        if match[1] == "old" and not os.path.lexists(final):
            os.rename(path, final)  # interrupted between the two renames of a replacement: this is the last whole one
        else:
            shutil.rmtree(path)
            removed.append(path)
    return removed
