"""The checkpoints of a run: written under a temporary name, renamed when complete, verified when read, pruned."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rlhf_ray.checkpoint.atomic_directory import (
    clear_leftovers,
    remove_directory,
    remove_tree,
    replace_directory,
    temporary_for,
)
from rlhf_ray.checkpoint.disk_space import disk_full_error, is_disk_full
from rlhf_ray.checkpoint.manifest import (
    MANIFEST_NAME,
    NewerSchemaError,
    read_manifest,
    verify_manifest,
    write_manifest,
)
from rlhf_ray.errors import CheckpointError
from rlhf_ray.failpoints import reached
from rlhf_ray.files.fsync import fsync_path, fsync_tree
from rlhf_ray.observability.owner_record import Term, read_owner

_STEP = re.compile(r"step_(\d+)")


class Checkpoint(NamedTuple):
    """A checkpoint whose every byte was compared with its manifest."""

    step: int
    path: Path


class CheckpointStore:
    """The directory `checkpoints/` of a run. One driver writes it at a time, the owner of the run's directory.

    A checkpoint is written in `.tmp-step_N-t<term>` (`begin`), and renamed to `step_N` after every byte is on disk and
    listed in its manifest (`commit`). An interruption leaves the previous checkpoint unchanged, and a leftover that
    `clean` removes. Older checkpoints are removed only after a newer one is complete. Workers may write into the
    temporary directory themselves, provided that they have finished when `commit` is called.

    Methods that rename raise SupersededError once another driver owns the run's directory. The manifest records the
    term of a checkpoint. A checkpoint that a superseded driver committed nevertheless, because its file system showed
    it stale state, does not belong to the run (`Record.disowns`): it is ignored, and `clean` removes it.
    """

    def __init__(self, root: Path, keep: int, warn: Callable[[str], None] | None = None, term: Term | None = None,
                 fetch: Callable[[int, Path], bool] | None = None,
                 in_use: Callable[[], int | None] = lambda: None):
        """
        Args:
            keep: how many of the newest checkpoints are kept.
            warn: receives a message about each damaged checkpoint; by default it is logged.
            term: in which the caller owns the run's directory; None for a caller that only reads.
            fetch: replaces a damaged checkpoint, given by step and this directory, by an intact copy from elsewhere;
                returns whether there was one.
            in_use: step of a checkpoint that is being read, which is not pruned now, but with a later one.
        """
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep={keep}: keep at least one checkpoint")
        self.root = Path(root)
        self.keep = keep
        self._warn = warn or logging.getLogger(__name__).warning
        self._term, self._fetch, self._in_use = term, fetch, in_use
        self._damaged: set[int] = set()
        self._protected: frozenset[int] = frozenset()

    def protect(self, steps: Iterable[int]) -> None:
        """Exempt the checkpoints of these steps, instead of earlier ones, from pruning: they are kept beside the `keep`
        newest."""
        self._protected = frozenset(steps)

    def begin(self, step: int) -> Path:
        """An empty directory to write the checkpoint of `step` into.

        Raises:
            CheckpointError: the disk is full.
        """
        tmp = temporary_for(self.path(step), self._term)
        with self.whole_or_nothing(tmp, step):
            if tmp.exists():
                remove_tree(tmp)
            tmp.mkdir(parents=True)
        return tmp

    def commit(self, tmp: Path, step: int) -> Path:
        """Make the contents of `tmp` the checkpoint of `step`, then prune. Returns its final path. If an old checkpoint
        cannot be removed, there is a warning, and another attempt after the next commit.

        Raises:
            CheckpointError: the disk is full, or `tmp` contains something other than regular files; `tmp` is removed.
            SupersededError: another driver owns the run's directory now; its files are unchanged.
        """
        final = self.path(step)
        with self.whole_or_nothing(tmp, step):
            fsync_tree(tmp)
            reached("checkpoint_unlisted")
            write_manifest(tmp, step, self._term.number if self._term else None)
            fsync_path(tmp)
            reached("checkpoint_unnamed")
            replace_directory(tmp, final, self._term)
        self._damaged.discard(step)
        self._prune()
        return final

    def newest_name(self) -> tuple[int, Path] | None:
        """Step and path of the newest checkpoint by its name; its bytes are not verified. None without any."""
        return next(iter(self.steps()), None)

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint, verified byte by byte; None without any. A damaged one is fetched first, if
        there is a copy.

        Raises:
            NewerSchemaError: the newest was written by a later version of this package.
            CheckpointError: all checkpoints are damaged. A run must not start from the beginning over them.
        """
        problems = []
        for step, path in self.steps():
            try:
                return self._verified(step, path)
            except NewerSchemaError:
                raise
            except CheckpointError as error:
                if self._fetch is not None:
                    self._warn(f"looking for another copy of a damaged checkpoint: {error}")
                    if self._fetch(step, self.root):
                        return self._verified(step, path)
                self._damaged.add(step)
                problems.append(str(error))
                self._warn(f"skipping a damaged checkpoint: {error}")
        if problems:
            raise CheckpointError(
                f"none of the {len(problems)} checkpoints in {self.root} is intact, and a new start would hide "
                f"that: {' | '.join(problems)}. Restore one, or move {self.root} away to start anew"
            )
        return None

    def at(self, step: int) -> Checkpoint | None:
        """The checkpoint of `step`, verified byte by byte; None if there is none.

        Raises:
            NewerSchemaError: it was written by a later version of this package.
            CheckpointError: it is damaged.
        """
        path = dict(self.steps()).get(step)
        return self._verified(step, path) if path else None

    def _verified(self, step: int, path: Path) -> Checkpoint:
        manifest = verify_manifest(path)
        if manifest.step != step:
            raise CheckpointError(f"checkpoint {path} holds step {manifest.step}: it was renamed. Rename it back")
        return Checkpoint(step, path)

    def clean(self) -> list[Path]:
        """Remove leftovers of interrupted writes in this and earlier terms, and checkpoints of superseded drivers;
        returns the removed paths. Call when the run starts, before `latest`."""
        if self._term is not None:
            self._term.check()
        removed = clear_leftovers(self.root, r"step_\d+", self._term)
        for path in sorted(self._disowned(cleaning=True)):
            self._warn(f"removing {path}: a superseded driver wrote it (term {read_manifest(path).term}), and the run "
                       "has resumed from an earlier step since")
            remove_directory(path, self._term)
            removed.append(path)
        return removed

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.root / f"step_{step}"

    def steps(self) -> list[tuple[int, Path]]:
        """Step and path of the run's checkpoints by their names, newest first; their bytes are not verified."""
        disowned = self._disowned()
        return [(step, path) for step, path in self._named() if path not in disowned]

    def _disowned(self, cleaning: bool = False) -> set[Path]:
        """Checkpoints that do not belong to the run: see the class, and `Record.disowns`."""
        record = self._term.record() if self._term else read_owner(self.root.parent)
        disowned = set()
        for step, path in self._named() if record else ():
            with suppress(CheckpointError):  # damaged checkpoints are reported by `latest`
                term = read_manifest(path).term
                if record and term is not None and record.disowns(term, step, cleaning):
                    disowned.add(path)
        return disowned

    def _named(self) -> list[tuple[int, Path]]:
        """Directories named step_<number>, newest first. Links are not followed: they lead out of the store."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                found.append((int(match[1]), path))
        return sorted(found, reverse=True)

    def _prune(self) -> None:
        """Remove checkpoints older than the `keep` newest, except protected ones, and leftovers of earlier removals.
        Those known to be damaged are not counted."""
        with self._warning(f"leftovers in {self.root}"):
            if stuck := [path for path in clear_leftovers(self.root, r"step_\d+", self._term) if path.exists()]:
                raise OSError(f"{stuck[0]} is still there")
        steps = self.steps()
        good = [step for step, path in steps if step not in self._damaged and (path / MANIFEST_NAME).is_file()]
        if len(good) <= self.keep:
            return
        oldest_kept = good[self.keep - 1]
        for step, path in steps:
            if step in self._protected or step == self._in_use():
                continue
            if step < oldest_kept and (path / MANIFEST_NAME).is_file():
                with self._warning(f"the old checkpoint {path}"):
                    remove_directory(path, self._term)

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Warn when something cannot be removed."""
        try:
            yield
        except OSError as error:
            self._warn(f"{what} cannot be removed ({error}): check its permissions, because the disk fills up. It is "
                       "tried again after the next checkpoint")

    def _safe(self) -> str:
        """The state of the previous checkpoint, for the message about one that failed."""
        newest = next((path for step, path in self.steps() if step not in self._damaged), None)
        return f"the previous checkpoint {newest} is intact" if newest else "no earlier checkpoint exists"

    @contextmanager
    def whole_or_nothing(self, tmp: Path, step: int) -> Iterator[None]:
        """Remove `tmp` when the block fails, and raise a clear error if the disk was full or another driver removed
        it."""
        try:
            yield
        except BaseException as error:
            if (reported := self.discard(tmp, step, error)) is not error:
                raise reported from error
            raise

    def discard(self, tmp: Path, step: int, error: BaseException) -> BaseException:
        """Remove a checkpoint that failed with `error`; returns the error to raise."""
        full = is_disk_full(error, self.root)
        written = sum(f.stat().st_size for f in tmp.rglob("*") if f.is_file() and not f.is_symlink())
        remove_tree(tmp, ignore_errors=True)
        if self._term is not None and isinstance(error, OSError):
            self._term.check()
        return disk_full_error(self.root, f"checkpoint of step {step}", written, self._safe()) if full else error
