"""Upload of a run (`run.upload`): a thread copies checkpoints, metrics, report and model to a URL during the run.

The thread checks the run's directory every few seconds. A checkpoint gets its name by one rename when it is complete,
so any directory with such a name may be copied. A failure is logged at once and tried again; it never ends the run.

The copies can be resumed from at any moment, however the upload ends: rows of metrics are there before the checkpoint
that they lead to (unless they cannot be copied), the best model before best.json, which names it, and no complete copy
of a checkpoint is removed before another is there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rlhf_ray.checkpoint.manifest import verify_manifest
from rlhf_ray.checkpoint.remote import CHECKPOINTS, WRITER, RemoteDirectory, silence_cloud_libraries
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.errors import CheckpointError, SupersededError, UploadError, first_line
from rlhf_ray.files.fsync import Interrupted, operation, progress
from rlhf_ray.observability.owner_record import FOLDER as OWNER_RECORDS
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.observability.run_directory import RunDirectory

LOOK_S = 2.0
"""Between two checks for a new checkpoint."""
AGAIN_S = 60.0
"""From a failure to the next try, unless a new checkpoint comes earlier."""
LAST_TRIES_S = (0.0, 5.0, 20.0)
"""Pauses before the tries at the end of the run."""
PATIENT_S = 5.0
"""Longest wait for the last files before a warning."""
LIVE = ("ledger.sqlite", "status.json", "tensorboard")
"""Names that are written continuously: they are copied when the run has ended. (Checkpoints hold the ledger.)"""


class Uploader:
    """The upload of one run. Call `start`, then `finish` when the run has written its last file."""

    def __init__(self, url: str, directory: RunDirectory, silence_s: float, keep: int,
                 warn: Callable[[str], None] | None = None) -> None:
        """
        Args:
            directory: of the run. When another driver owns it, its copies are not replaced any more.
            silence_s: longest time without progress, after the end of the run, before the upload is given up.
            keep: how many of the newest checkpoints are kept here, and so there.
        """
        silence_cloud_libraries()
        self.remote = RemoteDirectory(url, self._moved, directory.term)
        self.step: int | None = None
        """Of the newest checkpoint that this process has uploaded."""
        self.failure: str | None = None
        """The error of the last try; None if it succeeded."""
        self._directory, self._keep = directory, keep
        self._store = CheckpointStore(directory.checkpoints, keep, term=directory.term)
        self._end_reason: SupersededError | UploadError | None = None
        """Why nothing is copied any more."""
        self._silence_s, self._warn = silence_s, warn or logging.getLogger(__name__).warning
        self._sent: dict[str, tuple[int, int]] = {}
        self._warned: set[str] = set()
        self._tried: tuple[int | None, float] = (None, 0.0)
        self._moved_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="upload")

    def start(self, resume: bool) -> None:
        """Start the thread.

        Raises:
            ConfigError: the URL cannot be written, or holds another run.
        """
        self.remote.claim(resume)
        self._thread.start()

    def finish(self) -> None:
        """Copy the remaining files, and end the thread.

        Raises:
            UploadError: it failed, made no progress for too long, or another run uses the URL; earlier copies are
                intact.
            SupersededError: another driver owns the run's directory now.
        """
        self._over.set()
        self._moved()
        self._thread.join(PATIENT_S)
        if self._thread.is_alive():
            self._warn(f"the run has ended; its last files are being copied to {self.remote.url}")
        while self._thread.is_alive():
            self._thread.join(1.0)
            if time.monotonic() - self._moved_at > self._silence_s:
                self.failure = f"no progress for {self._silence_s:g} s"
                break
        if self._end_reason is not None:
            raise self._end_reason
        if self.failure:
            newest = "no checkpoint" if self.step is None else f"the checkpoint of step {self.step}"
            raise UploadError(
                f"not all of {self._directory.path} could be copied to {self.remote.url} ({self.failure}); it has "
                f"{newest}. The local run is complete; the same command with --resume copies what is missing")

    def _work(self) -> None:
        try:
            self._copy_during_run()
            self._copy_the_rest()
        except Exception as error:  # a bug, or an unexpected error of a file system
            self.failure = f"{type(error).__name__}: {first_line(error)}"
            self._warn(f"run.upload: copying has stopped to {self.remote.url} ({self.failure})")

    def _copy_during_run(self) -> None:
        while not self._over.wait(LOOK_S) and self._end_reason is None:
            newest = next((step for step, _ in self._steps()), None)
            tried, when = self._tried
            if newest not in (None, self.step) and (newest != tried or time.monotonic() - when > AGAIN_S):
                self._try(whole=False)

    def _copy_the_rest(self) -> None:
        for pause in LAST_TRIES_S:
            if self._end_reason is not None:
                return
            time.sleep(pause)
            self._moved()
            self._try(whole=True)
            if self.failure is None:
                break

    def _try(self, whole: bool) -> None:
        steps = self._steps()  # before the files: rows of metrics precede their checkpoint
        self._tried = (steps[0][0] if steps else None, time.monotonic())
        self.failure = self._failure_of(self.remote.check_claim)
        if self.failure is None:  # otherwise the URL may be another run's now
            sends = (lambda: self._send_files(whole), lambda: self._send_checkpoints(steps), self._send_best)
            failures = [self._failure_of(send) for send in sends]
            self.failure = next((failure for failure in failures if failure), None)
        if self._end_reason is not None:
            self.failure = None
        if self.failure:
            self._warn(f"run.upload: copying to {self.remote.url} failed ({self.failure}); it is tried again")

    def _failure_of(self, send: Callable[[], None]) -> str | None:
        """Make one part of a try, unless nothing is copied any more; returns why it failed."""
        if self._end_reason is not None:
            return None
        try:
            send()
        except (SupersededError, UploadError) as error:
            self._end_reason = error
            if isinstance(error, UploadError):
                self._warn(str(error))
        except Exception as error:  # whatever the library of this kind of place raises; the other parts may work
            return f"{type(error).__name__}: {first_line(error)}"
        return None

    def _steps(self) -> list[tuple[int, Path]]:
        with suppress(OSError):  # a disk that hangs; the thread must live until the end of the run
            return self._store.steps()
        return []

    def _send_checkpoints(self, steps: Sequence[tuple[int, Path]]) -> None:
        """Copy all checkpoints that have no copy, the newest first; then remove copies of those that were pruned here,
        and what interrupted uploads left."""
        for number, (step, path) in enumerate(steps):
            try:
                if self._send_checkpoint(step, path) and not number:
                    self.step = step
            except CheckpointError as error:
                if not number or not self._is_damaged(path):
                    raise
                self._warn_once(f"run.upload: the checkpoint of step {step} is not copied: {error}")
        here, complete = [step for step, _ in steps], self.remote.steps()
        for old in complete:
            if old not in here and sum(step > old for step in here if step in complete) >= self._keep:
                self.remote.remove(f"{CHECKPOINTS}/step_{old}")
        for unfinished in self.remote.begun_steps() - {*complete}:
            self.remote.remove(f"{CHECKPOINTS}/step_{unfinished}")

    def _send_checkpoint(self, step: int, path: Path) -> bool:
        """Copy a checkpoint that has no copy; it is not pruned meanwhile. The only copy is not replaced, even if it
        differs: a resumed run may have saved a step again, and both go on from there.

        Returns:
            whether there is a copy now; False if the checkpoint was removed meanwhile.
        """
        self._directory.being_uploaded = step
        try:
            if not self.remote.holds_checkpoint(path) and self.remote.steps() != [step]:
                self.remote.put_checkpoint(path)
        except (FileNotFoundError, CheckpointError):
            if path.exists():
                raise
            return False
        finally:
            self._directory.being_uploaded = None
        return True

    def _is_damaged(self, path: Path) -> bool:
        """Whether the local checkpoint is the reason why its copy is wrong."""
        try:
            verify_manifest(path)
        except CheckpointError:
            return True
        return False

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)

    def _send_best(self) -> None:
        """Copy the best model, and then best.json, unless that is there already: then so is the model."""
        mark, model = self._directory.best_mark, self._directory.best
        if not mark.is_file() or mark.read_bytes() == self.remote.read(mark.name):
            return
        self.remote.remove(mark.name)
        before = [_state(path) for path in (mark, *files_below(model))]
        for path in files_below(model):
            self._send(path)
        if before == [_state(path) for path in (mark, *files_below(model))]:  # no other step has become the best
            self.remote.put(mark, mark.name)

    def _send_files(self, whole: bool) -> None:
        """Copy the other files that have changed, and remove the copies of texts and metrics that were removed here: a
        resumed run would take them up. `whole`: also those that are written continuously."""
        run, present = self._directory, set()
        apart = (CHECKPOINTS, OWNER_RECORDS, run.best.name, run.episodes.name)
        for path in files_below(run.path, apart):
            name = path.relative_to(run.path)
            present.add(name.as_posix())
            if path != run.best_mark and (whole or not name.parts[0].startswith(LIVE)):
                self._send(path)
        removed = [copy for copy in self.remote.names(run.samples.name) if copy not in present]
        for copy in (*removed, run.metrics_part(len(run.metrics_parts()) + 1).name):
            self.remote.remove(copy)

    def _send(self, path: Path) -> None:
        """Copy a file if it has changed since it was copied; nothing if it is gone."""
        name = path.relative_to(self._directory.path).as_posix()
        try:
            state = _state(path)
            if self._sent.get(name) != state:
                self.remote.put(path, name)
                self._sent[name] = state
        except FileNotFoundError:
            if path.exists():
                raise

    def _moved(self) -> None:
        self._moved_at = time.monotonic()


def _state(path: Path) -> tuple[int, int]:
    """What changes with the content of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def files_below(directory: Path, except_for: Container[str] = ()) -> Iterator[Path]:
    """All files below a directory except links, hidden ones, and those in its own subdirectories `except_for`.
    Directories that are removed meanwhile are skipped."""
    for place, below, names in os.walk(directory):
        here = Path(place)
        below[:] = sorted(name for name in below if not name.startswith(".") and (
            name not in except_for or here != directory))
        paths = (here / name for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if path.is_file() and not path.is_symlink())


def fetch_newest(url: str, directory: Path, say: Callable[[str], None], term: Term | None = None) -> int | None:
    """Before a resume, copy the run from `url` into `directory` if its checkpoint there is newer; with the checkpoint
    of the best step, if there is one. A ledger in `directory` is removed: it is of an earlier part of the run.

    Returns:
        the step of the copied checkpoint; None if none was copied.

    Raises:
        ConfigError: the URL cannot be used.
        CheckpointError: it cannot be copied; the local checkpoints are unchanged.
    """
    silence_cloud_libraries()
    remote = RemoteDirectory(url, term=term)
    try:
        return _fetch_newest(remote, directory, say)
    except (CheckpointError, SupersededError):
        raise
    except Exception as error:  # whatever the library of this kind of place raises
        raise CheckpointError(
            f"the run cannot be fetched from run.upload={url!r} ({type(error).__name__}: {first_line(error)}): check "
            "the connection and the space on this disk, and pass --resume again; --run.upload=null resumes from the "
            "local checkpoints") from error


def _fetch_newest(remote: RemoteDirectory, directory: Path, say: Callable[[str], None]) -> int | None:
    store = CheckpointStore(directory / CHECKPOINTS, keep=1)
    here, there = store.newest_name(), next(iter(remote.steps()), None)
    if there is None or (here is not None and here[0] >= there):
        return None
    say(f"copying the run with its checkpoint of step {there} from {remote.url}")
    directory.mkdir(parents=True, exist_ok=True)
    others = f"{CHECKPOINTS}/", f"{OWNER_RECORDS}/", *LIVE, "summary.json", WRITER  # a writer is of one directory
    remote.get_all((name for name in remote.names() if not name.startswith(others)), directory)
    best = RunDirectory(directory).best_step()
    if best in remote.steps() and best != there and not store.path(best).exists():
        remote.get_checkpoint(best, store.root)
    for ledger in directory.glob(f"{RunDirectory(directory).ledger.name}*"):
        ledger.unlink()
    remote.get_checkpoint(there, store.root)
    return there


def fetch_copy(url: str, say: Callable[[str], None], term: Term | None, step: int, root: Path) -> bool:
    """Replace the damaged checkpoint of `step` in the directory `root` by its uploaded copy, if that is intact.

    Returns:
        whether there was one. Why not is only reported: an older checkpoint may do.
    """
    silence_cloud_libraries()
    try:
        with operation("fetch", f"{url}/{CHECKPOINTS}/step_{step}"):
            remote = RemoteDirectory(url, progress().move, term)
            if step not in remote.steps():
                say(f"run.upload={url} has no complete checkpoint of step {step}")
                return False
            remote.get_checkpoint(step, root, verified=True)
    except (SupersededError, Interrupted):
        raise
    except Exception as error:  # whatever the library of this kind of place raises
        say(f"the checkpoint of step {step} cannot be fetched from run.upload={url} ({type(error).__name__}: "
            f"{first_line(error)})")
        return False
    say(f"the checkpoint of step {step} was fetched from run.upload={url} in place of the damaged one")
    return True
