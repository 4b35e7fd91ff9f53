"""Copies of a run somewhere else (`run.upload`): checkpoints, numbers, report and model, by a thread beside the run.

The thread looks at the run's directory every few seconds. A checkpoint appears there by one rename when it is whole, so
whatever has its name may be copied. What fails is said at once and tried again; it never ends the run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from rlhf_ray.checkpoint.directory import CheckpointStore
from rlhf_ray.checkpoint.remote import CHECKPOINTS, RemoteDirectory, quieten
from rlhf_ray.errors import CheckpointError, SupersededError, UploadError, first_line
from rlhf_ray.observability.owner_record import Term

LOOK_S = 2.0
"""Between two looks for a new checkpoint."""
AGAIN_S = 60.0
"""From a failure to the next try, unless a new checkpoint comes before."""
LAST_TRIES_S = (0.0, 5.0, 20.0)
"""Pauses before the tries of the end, when no other comes."""
PATIENT_S = 5.0
"""Of waiting for the last files, until that is said."""
LIVE = ("ledger.sqlite", "status.json", "tensorboard")
"""Names that are written at any moment: they are copied when the run has ended. (Checkpoints hold the ledger.)"""


class Uploader:
    """One run's copies. `start`, then `finish` when the run has written its last file."""

    def __init__(self, url: str, directory: Path, silence_s: float, warn: Callable[[str], None] | None = None,
                 term: Term | None = None) -> None:
        """
        Args:
            silence_s: how long nothing may move before the end of the run gives its copies up.
            term: of the owner of the run's directory. Once it is over, nothing is copied over the next owner's copies.
        """
        quieten()
        self.remote = RemoteDirectory(url, self._moved, term)
        self.step: int | None = None
        """Of the newest checkpoint that this process knows to be there."""
        self.failure: str | None = None
        """What went wrong at the last try; None when it went well."""
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
        """Begin to copy.

        Raises:
            ConfigError: the place cannot be written, or holds another run.
        """
        self.remote.check(resume)
        self._thread.start()

    def finish(self) -> None:
        """Copy what is left, and end.

        Raises:
            UploadError: it failed, or nothing moved for too long; what was there before is whole.
            SupersededError: another driver owns the run's directory now.
        """
        self._over.set()
        self._moved()
        self._thread.join(PATIENT_S)
        if self._thread.is_alive():
            self._warn(f"the run is over; its last files are being copied to {self.remote.url}")
        while self._thread.is_alive():
            self._thread.join(1.0)
            if time.monotonic() - self._moved_at > self._silence_s:
                self.failure = f"nothing went over for {self._silence_s:g} s"
                break
        if self._superseded is not None:
            raise self._superseded
        if self.failure:
            newest = "no checkpoint" if self.step is None else f"the checkpoint of step {self.step}"
            raise UploadError(
                f"not all of {self._directory} could be copied to {self.remote.url} ({self.failure}); there is "
                f"{newest}. The run itself is whole here; the same command with --resume copies what is missing")

    def _work(self) -> None:
        try:
            self._copy_meanwhile()
            self._copy_the_rest()
        except Exception as error:  # a bug, or a file system that raises what it should not
            self.failure = f"{type(error).__name__}: {first_line(error)}"
            self._warn(f"run.upload: nothing more is copied to {self.remote.url} ({self.failure})")

    def _copy_meanwhile(self) -> None:
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
                return  # superseded while it was on its way; the newer one is next
            self.failure = f"{type(error).__name__}: {first_line(error)}"
            self._warn(f"run.upload: copying to {self.remote.url} failed ({self.failure}); it is tried again")
        else:
            self.failure = None

    def _newest(self) -> tuple[int, Path] | None:
        with suppress(OSError):  # a disk that does not answer now; this thread is to see the end of the run
            return self._store.newest_name()
        return None

    def _send_checkpoint(self, step: int, path: Path) -> None:
        """Copy a checkpoint, then remove those that are no longer kept here."""
        if not self.remote.holds_checkpoint(path):
            self.remote.put_checkpoint(path)
        self.step = step
        for old in self.remote.steps():
            if old != step and not self._store.path(old).exists():
                self.remote.remove(f"{CHECKPOINTS}/step_{old}")

    def _send_files(self, whole: bool) -> None:
        """Copy what changed of all else. `whole`: also what is written at any moment."""
        for path in self._files():
            name = path.relative_to(self._directory)
            if not whole and name.parts[0].startswith(LIVE):
                continue
            try:
                found = path.stat()
                mark = (found.st_size, found.st_mtime_ns)
                if self._sent.get(name.as_posix()) == mark:
                    continue
                self.remote.put(path, name.as_posix())
            except FileNotFoundError:
                if path.exists():
                    raise
            else:
                self._sent[name.as_posix()] = mark

    def _files(self) -> Iterator[Path]:
        """All but checkpoints, links and what is hidden. Directories that are removed meanwhile are passed over."""
        for place, below, names in os.walk(self._directory):
            here = Path(place)
            below[:] = sorted(name for name in below if not name.startswith(".") and (
                name != CHECKPOINTS or here != self._directory))
            found = (here / name for name in sorted(names) if not name.startswith("."))
            yield from (path for path in found if path.is_file() and not path.is_symlink())

    def _moved(self) -> None:
        self._moved_at = time.monotonic()


def bring_back(url: str, directory: Path, say: Callable[[str], None], term: Term | None = None) -> int | None:
    """Before a resume: copy the run from `url` into `directory`, where that has a newer checkpoint than is here.

    Args:
        term: in which the caller owns the directory.

    Returns:
        the step of the checkpoint that was copied; None where nothing had to be.

    Raises:
        ConfigError: the place cannot be used.
        CheckpointError: it cannot be copied; no checkpoint here has changed.
    """
    quieten()
    remote = RemoteDirectory(url, term=term)
    try:
        return _brought_back(remote, directory, say)
    except (CheckpointError, SupersededError):
        raise
    except Exception as error:  # whatever the library of this kind of place raises
        raise CheckpointError(
            f"the run cannot be fetched from run.upload={url!r} ({type(error).__name__}: {first_line(error)}): see to "
            "the connection and to room on this disk, and pass --resume again; --run.upload=null goes on without it "
            "from what is here") from error


def _brought_back(remote: RemoteDirectory, directory: Path, say: Callable[[str], None]) -> int | None:
    store = CheckpointStore(directory / CHECKPOINTS, keep=1)
    here, there = store.newest_name(), next(iter(remote.steps()), None)
    if there is None or (here is not None and here[0] >= there):
        return None
    say(f"copying the run with its checkpoint of step {there} from {remote.url}")
    directory.mkdir(parents=True, exist_ok=True)
    remote.get_all((name for name in remote.names() if not name.startswith((f"{CHECKPOINTS}/", *LIVE, "summary.json"))),
                   directory)
    remote.get_checkpoint(there, store.root)
    return there
