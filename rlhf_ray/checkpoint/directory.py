"""The checkpoints of a run: written beside, renamed into place, verified when found, pruned when superseded."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_ray.checkpoint.atomic import (
    clear_leftovers,
    remove_directory,
    remove_tree,
    replace_directory,
    temporary_for,
)
from rlhf_ray.checkpoint.disk import disk_full_error, is_disk_full, require_space
from rlhf_ray.checkpoint.manifest import (
    MANIFEST_NAME,
    TERM,
    Manifest,
    NewerSchemaError,
    read_manifest,
    verify_manifest,
    write_manifest,
)
from rlhf_ray.errors import CheckpointError
from rlhf_ray.failpoints import reached
from rlhf_ray.files.durable import fsync_path, fsync_tree
from rlhf_ray.observability.owner_record import Term

_STEP = re.compile(r"step_(\d+)")


class Checkpoint(NamedTuple):
    """One whose every byte was compared with its manifest."""

    step: int
    path: Path
    manifest: Manifest


class CheckpointStore:
    """The directory `checkpoints/` of a run. It belongs to one driver at a time, the owner of the run's directory.

    A checkpoint is written in `.tmp-step_N-t<term>` (`begin`), and becomes `step_N` by one rename after every byte is
    on disk and its manifest lists them all (`commit`). Whatever interrupts this leaves the previous checkpoint as it
    was, and a leftover that `clean` removes. Older checkpoints go only after a newer one is in place. Workers may write
    into the temporary directory themselves, as long as they have finished when `commit` is called.

    Methods that rename raise SupersededError once another driver owns the run's directory. The manifest records the
    term of a checkpoint. One that a superseded driver committed all the same, because its file system showed it stale
    state, does not belong to the run (`Record.disowns`): it is ignored, and `clean` removes it.
    """

    def __init__(self, root: Path, keep: int, warn: Callable[[str], None] | None = None, term: Term | None = None):
        """Keeps the `keep` newest.

        Args:
            warn: receives a message about each damaged checkpoint; by default it is logged.
            term: in which the caller owns the run's directory; who only looks has none.
        """
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep={keep}: keep at least one checkpoint")
        self.root = Path(root)
        self.keep = keep
        self._warn = warn or logging.getLogger(__name__).warning
        self._term = term
        self._damaged: set[int] = set()
        self._protected: frozenset[int] = frozenset()

    def protect(self, steps: Iterable[int]) -> None:
        """Never prune the checkpoints of these steps, until told of others. They do not count among the newest."""
        self._protected = frozenset(steps)

    def begin(self, step: int, needed_bytes: int = 0) -> Path:
        """An empty directory to write the checkpoint of `step` into.

        Args:
            needed_bytes: estimate of its size; checked against the free space now rather than minutes later.

        Raises:
            CheckpointError: not enough space, or the directory cannot be made.
        """
        tmp = temporary_for(self.path(step), self._term)
        require_space(self.root, needed_bytes, f"checkpoint of step {step}", self._safe())
        with self.whole_or_nothing(tmp, step):
            if tmp.exists():
                remove_tree(tmp)
            tmp.mkdir(parents=True)
        return tmp

    def commit(self, tmp: Path, step: int, extra: Mapping[str, Any] | None = None) -> Path:
        """Make what was written in `tmp` the checkpoint of `step`, then prune. Returns its final path.

        Raises:
            CheckpointError: the disk is full, or `tmp` holds something that is not a regular file; `tmp` is gone then.
            SupersededError: another driver owns the run's directory now; nothing of its was touched.
        """
        final = self.path(step)
        with self.whole_or_nothing(tmp, step):
            fsync_tree(tmp)
            reached("checkpoint_unlisted")
            write_manifest(tmp, step, {**(extra or {}), **({TERM: self._term.number} if self._term else {})})
            fsync_path(tmp)
            reached("checkpoint_unnamed")
            replace_directory(tmp, final, self._term)
        self._damaged.discard(step)
        self._prune()
        return final

    def newest_name(self) -> tuple[int, Path] | None:
        """Step and path of what is named as the newest checkpoint, without a look at its bytes; None without any."""
        return next(iter(self._steps()), None)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose every byte is as written; None without any.

        Raises:
            NewerSchemaError: the newest was written by a later version of this package.
            CheckpointError: there are checkpoints, and all of them are damaged. A run must not start afresh over them.
        """
        problems = []
        for step, path in self._steps():
            try:
                manifest = verify_manifest(path)
                if manifest.step != step:
                    raise CheckpointError(f"checkpoint {path} holds step {manifest.step}; it was renamed")
                return Checkpoint(step, path, manifest)
            except NewerSchemaError:
                raise
            except CheckpointError as error:
                self._damaged.add(step)
                problems.append(str(error))
                self._warn(f"passing over a damaged checkpoint: {error}")
        if problems:
            raise CheckpointError(
                f"none of the {len(problems)} checkpoints in {self.root} is intact, and starting afresh would hide "
                f"that: {' | '.join(problems)}. Restore one, or move {self.root} away to start anew"
            )
        return None

    def clean(self) -> list[Path]:
        """Remove what interrupted writes of this and earlier terms left behind, and checkpoints of superseded drivers;
        returns the paths. Call when the run starts, before `latest`."""
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

    def _steps(self) -> list[tuple[int, Path]]:
        """The run's checkpoints by their names, newest first."""
        disowned = self._disowned()
        return [(step, path) for step, path in self._named() if path not in disowned]

    def _disowned(self, cleaning: bool = False) -> set[Path]:
        """What looks like a checkpoint of the run, and is none: see the class, and `Record.disowns`."""
        record = self._term.record() if self._term else None
        found = set()
        for step, path in self._named() if record else ():
            with suppress(CheckpointError):  # a damaged one is told of as such
                made = read_manifest(path).term
                if record and made is not None and record.disowns(made, step, cleaning):
                    found.add(path)
        return found

    def _named(self) -> list[tuple[int, Path]]:
        """Directories named step_<number>, newest first. Links are not followed: what they point to is not ours."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                found.append((int(match[1]), path))
        return sorted(found, reverse=True)

    def _prune(self) -> None:
        """Delete checkpoints older than the `keep` newest, but for protected ones. Ones known to be damaged are not
        counted among the newest."""
        steps = self._steps()
        good = [step for step, path in steps if step not in self._damaged and (path / MANIFEST_NAME).is_file()]
        if len(good) <= self.keep:
            return
        oldest_kept = good[self.keep - 1]
        for step, path in steps:
            if step < oldest_kept and step not in self._protected and (path / MANIFEST_NAME).is_file():
                remove_directory(path, self._term)

    def _safe(self) -> str:
        """What to tell someone whose checkpoint failed about the one before."""
        newest = next((path for step, path in self._steps() if step not in self._damaged), None)
        return f"the previous checkpoint {newest} is intact" if newest else "no earlier checkpoint exists"

    @contextmanager
    def whole_or_nothing(self, tmp: Path, step: int) -> Iterator[None]:
        """Remove `tmp` when the block fails, and say so plainly when the disk was full or another driver removed it."""
        try:
            yield
        except BaseException as error:
            if (reported := self.given_up(tmp, step, error)) is not error:
                raise reported from error
            raise

    def given_up(self, tmp: Path, step: int, error: BaseException) -> BaseException:
        """Remove what was written of a checkpoint that failed with `error`; returns what to raise."""
        full = is_disk_full(error, self.root)
        written = sum(f.stat().st_size for f in tmp.rglob("*") if f.is_file() and not f.is_symlink())
        remove_tree(tmp, ignore_errors=True)
        if self._term is not None and isinstance(error, OSError):
            self._term.check()
        return disk_full_error(self.root, f"checkpoint of step {step}", written, self._safe()) if full else error
