"""The owner's side of a term: a thread renews the record, whatever the event loop does, and notices when another driver
has taken over."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlhf_ray.errors import SupersededError
from rlhf_ray.files.durable import fsync_descriptor
from rlhf_ray.observability.owner import BEAT_S, GONE, SILENT_S, Record, Term

LEAVING_S = 10.0
"""For the record to be closed at the end: a disk that hangs holds nobody up longer."""


class Ownership:
    """One driver's term over a run's directory, from the claim to the end."""

    def __init__(self, term: Term, warn: Callable[[str], None] | None = None) -> None:
        """`warn` is told when the record cannot be renewed; by default it is logged."""
        record = term.record()
        if record is None:
            raise term.superseded()
        self.term, self._record, self._warn = term, record, warn or logging.getLogger(__name__).warning
        self.lost: SupersededError | None = None
        """What the driver ends with, once another one has taken over."""
        self._on_lost: Callable[[], None] = lambda: None
        self._lock, self._over, self._failing = threading.Lock(), threading.Event(), False

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Have the thread that renews the record call this when the term is over; at once where it is."""
        self._on_lost = callback
        if self.lost:
            callback()

    def go_on_from(self, step: int | None) -> None:
        """Note the checkpoint that the run goes on from (None: it begins anew): later ones of other terms do not belong
        to it.

        Raises:
            SupersededError: the term is over.
        """
        self.term.check()
        with self._lock:
            self._write(went_on_from=-1 if step is None else step, flush=True)

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the record meanwhile, and leave the directory to whoever comes next at the end."""
        thread = threading.Thread(target=self._keep_renewing, daemon=True, name="owner record")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(LEAVING_S)

    def renew(self, ended: bool = False) -> None:
        """Raise the record's counter, or mark it as ended. A failure to write it is warned of once, and the next call
        tries again."""
        try:
            self.term.check()
            with self._lock:
                self._write(beat=self._record.beat + 1, ended=ended)
            self._failing = False
        except SupersededError as error:
            self._lose(error)
        except OSError as error:
            if error.errno in GONE:  # gone since it was asked for
                self._lose(self.term.superseded())
            elif not self._failing:
                self._failing = True
                self._warn(f"{self.term.path} cannot be renewed ({error.strerror or error}); the run goes on, but a "
                           f"driver on another machine may take it over when this lasts for {SILENT_S:g} s")

    def _keep_renewing(self) -> None:
        while not self._over.wait(BEAT_S) and self.lost is None:
            try:
                self.renew()
            except Exception as bug:  # whatever it is, the record has to be renewed again
                self._warn(f"{self.term.path} was not renewed: {type(bug).__name__}: {bug}")
        if self.lost is None:
            self.renew(ended=True)

    def _lose(self, error: SupersededError) -> None:
        if self.lost is None:
            self.lost = error
            self._on_lost()

    def _write(self, flush: bool = False, **changes: Any) -> None:
        """Overwrite the record in place. It is not made anew where a successor has removed it."""
        record: Record = replace(self._record, renewed=time.time(), **changes)
        handle = os.open(self.term.path, os.O_WRONLY)
        try:
            os.pwrite(handle, record.encoded(), 0)
            if flush:
                fsync_descriptor(handle, self.term.path)
        finally:
            os.close(handle)
        self._record = record
