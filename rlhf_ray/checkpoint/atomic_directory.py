"""Directories that are replaced and removed atomically: flush everything to disk, then rename."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlhf_ray.files.fsync import fsync_path, operation
from rlhf_ray.observability.owner_record import Term, renaming


def files_under(directory: Path) -> Iterator[Path]:
    """Everything below `directory` that is not a plain directory, sorted: files, and links of any kind."""
    for folder, names, files in os.walk(directory, followlinks=False):
        names.sort()
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        yield from (Path(folder, name) for name in sorted(files + links))


def temporary_for(final: Path, term: Term | None = None) -> Path:
    """The name of a directory while it is written, before it becomes `final`; in a run's directory it contains the
    owner's term."""
    return _sibling(final, "tmp", term)


def replace_directory(new: Path, final: Path, term: Term | None = None) -> None:
    """Give the flushed directory `new` the name `final`, on the same file system.

    A free name is taken in one atomic rename. An existing directory is moved aside first and removed afterwards: a
    crash in between leaves both complete under other names and `final` absent, which `clear_leftovers` repairs. The
    term is checked again before the second rename: if it is over, the directory moved aside, which may be a
    successor's, goes back.

    Raises:
        FileExistsError: `final` is not a plain directory.
        SupersededError: the term is over; `final` is unchanged.
    """
    aside = None
    if os.path.lexists(final):
        if final.is_symlink() or not final.is_dir():
            raise FileExistsError(f"{final} is not a plain directory; move it elsewhere")
        aside = _sibling(final, "old", term)
        with renaming(term):
            os.rename(final, aside)
    try:
        with operation("rename", new), renaming(term):
            os.rename(new, final)
    except BaseException:
        if aside is not None:
            with suppress(OSError):  # a successor has created another one meanwhile
                os.rename(aside, final)
        raise
    fsync_path(final.parent)
    if aside is not None:
        remove_tree(aside, ignore_errors=True)  # `clear_leftovers` removes what is left


def remove_directory(path: Path, term: Term | None = None) -> None:
    """Rename a directory, then remove it, so that an interrupted removal does not look like a damaged directory."""
    remove_tree(_renamed_for_removal(path, path, term))


def remove_tree(directory: Path, ignore_errors: bool = False) -> None:
    """Remove a directory and its contents. Links are removed, not followed."""
    with operation("remove", directory):
        shutil.rmtree(directory, ignore_errors=ignore_errors)


def clear_leftovers(parent: Path, name: str, term: Term | None = None) -> list[Path]:
    """Remove leftovers of interrupted writes, replacements and removals from `parent`; returns the removed paths.

    Args:
        name: regular expression of the final names whose leftovers these are.
        term: of the owner of the run's directory: directories that later terms are writing are kept.

    Raises:
        SupersededError: the term is over.
    """
    removed = []
    for path in sorted(parent.glob(".*-*-*")):
        match = re.fullmatch(rf"\.(tmp|old|del)-({name})-(?:t(\d+)|\d+)", path.name)
        if not match or path.is_symlink() or not path.is_dir():
            continue
        if term is not None and int(match[3] or 0) > term.number:
            continue
        final = parent / match[2]
        if match[1] == "old" and not os.path.lexists(final):
            with renaming(term):  # interrupted between the two renames of a replacement: this is the last complete one
                os.rename(path, final)
            continue
        # The writer of a temporary directory may be about to rename it.
        doomed = _renamed_for_removal(path, final, term) if match[1] == "tmp" else path
        remove_tree(doomed, ignore_errors=True)  # a worker that is still alive may write into it
        removed.append(path)
    return removed


def _renamed_for_removal(path: Path, final: Path, term: Term | None) -> Path:
    """Rename a directory that is to be removed; returns its new path."""
    doomed = _sibling(final, "del", term)
    shutil.rmtree(doomed, ignore_errors=True)
    with renaming(term):
        os.rename(path, doomed)
    return doomed


def _sibling(path: Path, kind: str, term: Term | None) -> Path:
    return path.parent / f".{kind}-{path.name}-{term.mark if term else os.getpid()}"
