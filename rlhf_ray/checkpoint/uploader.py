"""Upload of a run (`run.upload`): a thread copies checkpoints, metrics, report and model to a URL during the run.

The thread checks the run's directory every few seconds. A checkpoint gets its name by one rename when it is complete,
so any directory with such a name may be copied. A failure is logged at once and tried again; it never ends the run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from rlhf_ray.checkpoint.remote import CHECKPOINTS, RemoteDirectory, silence_cloud_libraries
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

    def __init__(self, url: str, directory: Path, silence_s: float, warn: Callable[[str], None] | None = None,
                 term: Term | None = None) -> None:
        """
        Args:
            silence_s: longest time without progress, after the end of the run, before the upload is given up.
            term: of the owner of the run's directory. Once it is over, the next owner's copies are not replaced.
        """
        silence_cloud_libraries()
        self.remote = RemoteDirectory(url, self._moved, term)
        self.step: int | None = None
        """Of the newest checkpoint that this process has uploaded."""
        self.failure: str | None = None
        """The error of the last try; None if it succeeded."""
        self._directory, self._store = directory, CheckpointStore(directory / CHECKPOINTS, keep=1,
                                                                  term=term)
        self._superseded: SupersededError | None = None
        self._silence_s, self._warn = silence_s, warn or logging.getLogger(__name__).warning
        self._sent: dict[str, tuple[int, int]] = {}
        self._tried: tuple[int | None, float] = (None, 0.0)
        self._moved_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="upload")

    def start(self, resume: bool) -> None:
        """Start the thread.

        Raises:
            ConfigError: the URL cannot be written, or holds another run.
        """
        self.remote.check(resume)
        self._thread.start()

    def finish(self) -> None:
        """Copy the remaining files, and end the thread.

        Raises:
            UploadError: it failed, or made no progress for too long; earlier copies are intact.
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
        if self._superseded is not None:
            raise self._superseded
        if self.failure:
            newest = "no checkpoint" if self.step is None else f"the checkpoint of step {self.step}"
            raise UploadError(
                f"not all of {self._directory} could be copied to {self.remote.url} ({self.failure}); it has "
                f"{newest}. The local run is complete; the same command with --resume copies what is missing")

    def _work(self) -> None:
        try:
            self._copy_during_run()
            self._copy_the_rest()
        except Exception as error:  # a bug, or an unexpected error of a file system
            self.failure = f"{type(error).__name__}: {first_line(error)}"
            self._warn(f"run.upload: copying has stopped to {self.remote.url} ({self.failure})")

    def _copy_during_run(self) -> None:
        while not self._over.wait(LOOK_S) and self._superseded is None:
            newest = self._newest()
            new = newest is not None and newest[0] != self.step
            tried, when = self._tried
            if new and newest is not None and (newest[0] != tried or time.monotonic() - when > AGAIN_S):
                self._try(whole=False)

    def _copy_the_rest(self) -> None:
        for pause in LAST_TRIES_S:
            if self._superseded is not None:
                return
            time.sleep(pause)
            self._moved()
            self._try(whole=True)
            if self.failure is None:
                break

    def _try(self, whole: bool) -> None:
        newest = self._newest()
        self._tried = (newest[0] if newest else None, time.monotonic())
        try:
            if newest is not None:
                self._send_checkpoint(*newest)
            self._send_files(whole)
        except SupersededError as error:
            self._superseded, self.failure = error, None
        except Exception as error:  # whatever the library of this kind of place raises
            if newest is not None and not newest[1].exists():
                return  # pruned while it was copied; the newer one is next
            self.failure = f"{type(error).__name__}: {first_line(error)}"
            self._warn(f"run.upload: copying to {self.remote.url} failed ({self.failure}); it is tried again")
        else:
            self.failure = None

    def _newest(self) -> tuple[int, Path] | None:
        with suppress(OSError):  # a disk that hangs; the thread must live until the end of the run
            return self._store.newest_name()
        return None

    def _send_checkpoint(self, step: int, path: Path) -> None:
        """Copy a checkpoint, then remove the copies of those that were pruned locally."""
        if not self.remote.holds_checkpoint(path):
            self.remote.put_checkpoint(path)
        self.step = step
        for old in self.remote.steps():
            if old != step and not self._store.path(old).exists():
                self.remote.remove(f"{CHECKPOINTS}/step_{old}")

    def _send_files(self, whole: bool) -> None:
        """Copy the other files that have changed, and remove the copies of texts and metrics that were removed here: a
        resumed run would take them up. `whole`: also those that are written continuously."""
        present = set()
        for path in self._files():
            name = path.relative_to(self._directory)
            present.add(name.as_posix())
            if not whole and name.parts[0].startswith(LIVE):
                continue
            try:
                status = path.stat()
                mark = (status.st_size, status.st_mtime_ns)
                if self._sent.get(name.as_posix()) == mark:
                    continue
                self.remote.put(path, name.as_posix())
            except FileNotFoundError:
                if path.exists():
                    raise
            else:
                self._sent[name.as_posix()] = mark
        run = RunDirectory(self._directory)
        removed = [copy for copy in self.remote.names(run.samples.name) if copy not in present]
        for copy in (*removed, run.metrics_part(len(run.metrics_parts()) + 1).name):
            self.remote.remove(copy)

    def _files(self) -> Iterator[Path]:
        """All files except checkpoints, owner records, links and hidden ones. Directories that are removed meanwhile
        are skipped."""
        for place, below, names in os.walk(self._directory):
            here = Path(place)
            below[:] = sorted(name for name in below if not name.startswith(".") and (
                name not in (CHECKPOINTS, OWNER_RECORDS) or here != self._directory))
            paths = (here / name for name in sorted(names) if not name.startswith("."))
            yield from (path for path in paths if path.is_file() and not path.is_symlink())

    def _moved(self) -> None:
        self._moved_at = time.monotonic()


def fetch_newest(url: str, directory: Path, say: Callable[[str], None], term: Term | None = None) -> int | None:
    """Before a resume, copy the run from `url` into `directory` if its checkpoint there is newer.

    Args:
        term: in which the caller owns the directory.

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
    others = f"{CHECKPOINTS}/", f"{OWNER_RECORDS}/", *LIVE, "summary.json"  # an owner record is of one directory
    remote.get_all((name for name in remote.names() if not name.startswith(others)), directory)
    remote.get_checkpoint(there, store.root)
    return there


def fetch_copy(url: str, say: Callable[[str], None], term: Term | None, step: int, root: Path) -> bool:
    """Replace the damaged checkpoint of `step` in the directory `root` by its uploaded copy, if that is intact.

    Args:
        term: in which the caller owns the run's directory.

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
