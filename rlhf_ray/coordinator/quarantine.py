"""Quarantine of prompts with a sample that has no score: they leave the run, up to a limit.

A prompt leaves with all its samples, because estimators compare them with each other. It leaves for the present epoch:
the next one visits its row again. The limit counts rows, not failures. One row stays, whatever the limit is: a run
whose every prompt leaves in every epoch would draw them without end, and never have a batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from rlhf_ray.errors import RewardError, UnscoredSamples, first_line
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.files.writing import append_json_lines, truncate_lines
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.records import SampleKey, Unscored
from rlhf_ray.replay.ledger import Ledger

SHOWN = 3
"""Reasons in the error that ends a run."""


class Quarantine:
    """The quarantined samples: in the ledger with their reasons, in a file with their texts."""

    def __init__(self, ledger: Ledger, file: Path, limit: float, rows: int, warn: Callable[[str], None],
                 term: Term | None = None, thread: FileThread | None = None) -> None:
        """Start with the samples in the ledger; lines at the end of the file about other samples are removed.

        Args:
            limit: largest share of the prompts.
            rows: prompts of the data set.
            thread: writes the file; without one it is written at once.
        """
        self._term = term
        self._ledger, self._file, self._limit, self._rows, self._warn = ledger, file, limit, rows, warn
        self._thread = thread
        share = max(1, int(round(limit * rows, 6)))  # 0.29 * 100 is a little less than 29
        self._allowed = min(share, rows - 1)
        known = ledger.quarantined()
        self._reasons = dict(known.reasons)
        """By row: the first reason."""
        self.samples = known.samples
        """Samples set aside."""
        truncate_lines(file, lambda line: SampleKey(*json.loads(line)["key"]) in known, term)

    def set_aside(self, keys: Sequence[SampleKey], error: UnscoredSamples) -> list[SampleKey]:
        """Quarantine the prompts of a chunk that have samples without a score; returns the other samples.

        Raises:
            RewardError: more prompts would leave than the limit allows; names the first reasons.
        """
        reasons = {(s.key.epoch, s.key.row): s.reason for s in error.samples if s.key in keys}
        leaving = [key for key in keys if (key.epoch, key.row) in reasons]
        for (_, row), reason in reasons.items():
            self._reasons.setdefault(row, reason)
        if len(self._reasons) > self._allowed:
            raise self._too_many() from error
        blamed = {sample.key: sample for sample in error.samples}
        for key in leaving:
            reason = blamed[key].reason if key in blamed else "another sample of its prompt has no score"
            self._ledger.quarantine([key], reason)
        unscored = [blamed[key] for key in leaving if key in blamed]
        if self._thread is None:
            self._write(unscored)
        else:
            self._thread.submit(self._write, unscored).add_done_callback(self._written)
        self.samples += len(leaving)
        if reasons:
            (epoch, row), others = next(iter(reasons)), len(reasons) - 1
            leave = f"and {others} more leave epoch {epoch}: they have" if others else f"leaves epoch {epoch}: it has"
            self._warn(f"the prompt of row {row} {leave} a sample without a score ({len(self._reasons)} of at most "
                       f"{self._allowed} prompts; see {self._file.name}): {reasons[epoch, row]}")
        return [key for key in keys if (key.epoch, key.row) not in reasons]

    def _written(self, job: Future[None]) -> None:
        if (error := job.exception()) is not None:
            self._warn(f"{self._file} cannot be written ({first_line(error)}); the ledger has the reasons")

    def _write(self, samples: Sequence[Unscored]) -> None:
        rows = [{**asdict(sample), "key": list(sample.key.numbers)} for sample in samples]
        append_json_lines(self._file, rows, self._term)

    def _too_many(self) -> RewardError:
        listed = "\n".join(f"- row {row}: {reason}" for row, reason in list(self._reasons.items())[:SHOWN])
        return RewardError(
            f"{len(self._reasons)} of {self._rows} prompts have samples without a score, and "
            f"reward.quarantine_limit={self._limit:g} lets {self._allowed} leave the run. The first:\n{listed}\n"
            "Fix the reward or the prompts (a missing score is never replaced by a default), or raise the limit, and "
            "--resume")
