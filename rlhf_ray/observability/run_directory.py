"""The directory that a run writes: the names in it, and the refusal to overwrite another run.

The contents of the files belong to the modules that write them (metrics, checkpoints, report).
"""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.files.writer_thread import RunFiles
from rlhf_ray.files.writing import try_to_write, write_atomically
from rlhf_ray.observability.owner_record import FOLDER, ProcessIdentity, Term
from rlhf_ray.observability.ownership import Ownership, claim

MIB = 2**20
UNFINISHED = re.compile(r"\..+\.(json|jsonl|parquet|html|yaml|safetensors)\.(?:t(\d+)-)?[a-z0-9_]{8}")
"""A file of a run that `write_atomically` has not renamed yet; with the writer's term."""


class RunDirectory:
    """Names of everything a run writes below one path. Only `create` touches the disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.ownership: Ownership | None = None
        """This process's ownership while it is `owned`; None in a process that only reads."""
        self.being_uploaded: int | None = None
        """Step of the checkpoint that is being copied to `run.upload`; it is not pruned meanwhile."""
        self.files = RunFiles()
        """The threads that write the run's files; each starts at the first write."""
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.sqlite"
        self.left_out = self.path / "left_out.jsonl"
        self.quarantine = self.path / "quarantine.jsonl"
        self.preferences = self.path / "preferences.jsonl"
        self.samples = self.path / "samples"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.model_ema = self.path / "model_ema"
        self.value_head = self.path / "value_head.safetensors"
        self.adapter = self.path / "adapter"
        self.best = self.path / "best"
        self.best_mark = self.path / "best.json"
        self.evaluation = self.path / "evaluation.json"
        self.summary = self.path / "summary.json"
        self.status = self.path / "status.json"
        self.faults = self.path / "faults.jsonl"
        self.control = self.path / "control"
        self.profile = self.path / "profile"
        self.generators = self.path / "generators.json"
        self.report = self.path / "report.html"
        self.exports = self.path / "export"
        self.episodes = self.path / "episodes"

    @classmethod
    def create(cls, path: str | Path, resume: bool = False, need_mb: int = 64) -> RunDirectory:
        """Make the directory, or take an existing one, and check that it can be written.

        A directory that contains only a config.yaml is not a run yet: its run failed before its first checkpoint.
        Resuming without a run starts one, so that a scheduler may always pass --resume.

        Raises:
            ConfigError: it holds a run and `resume` is False; it cannot be written; less than `need_mb` MiB are free.
        """
        run = cls(path)
        _check_writable(run.path)
        if not resume and (found := run.traces()):
            raise ConfigError(
                f"run.dir={str(path)!r} already holds a run ({', '.join(found)}): "
                "pass --resume (from Python: resume=True) to continue it, or choose another run.dir"
            )
        _check_space(run.path, need_mb)
        return run

    @contextmanager
    def owned(self) -> Iterator[Ownership]:
        """Own the directory during the enclosed work: other drivers are refused, on any machine, and writes of this
        object are refused once another driver has taken over. Unfinished files of earlier owners are removed. Read
        nothing of the run before.

        Raises:
            ConfigError: another live driver owns it, or its record cannot be read or written.
        """
        try:
            term = claim(self.path, ProcessIdentity.own(), logging.getLogger(__name__).warning)
            self.ownership = Ownership(term)
        except OSError as error:
            raise ConfigError(f"the owner record of run.dir={str(self.path)!r} cannot be read or written "
                              f"({error.strerror or error}): check the directory {self.path / FOLDER}") from error
        with self.ownership.renewed():
            for folder in (self.path, self.samples, self.control):
                for file in folder.glob(".*"):
                    match = UNFINISHED.fullmatch(file.name)
                    if match and int(match[2] or 0) < term.number:
                        file.unlink(missing_ok=True)
            yield self.ownership

    @property
    def term(self) -> Term | None:
        """The term in which this process owns the directory; None in a process that only reads."""
        return self.ownership.term if self.ownership else None

    def metrics_part(self, number: int) -> Path:
        """The file of metrics with this number, from 1."""
        return self.metrics if number == 1 else self.path / f"metrics-{number:05d}.jsonl"

    def metrics_parts(self) -> list[Path]:
        """The files of metrics that exist, oldest first."""
        return list(takewhile(Path.exists, map(self.metrics_part, count(1))))

    def traces(self) -> list[str]:
        """Names of files of an earlier run that a new run would overwrite."""
        files = [f for f in (self.metrics, self.summary) if f.is_file() and f.stat().st_size]
        folders = (self.samples, self.checkpoints, self.model, self.model_ema, self.adapter, self.best)
        return [f.name for f in files] + [d.name + "/" for d in folders if d.is_dir() and any(d.iterdir())]

    def newest_export(self) -> Path | None:
        """The model of the highest step that `rlhf-ray export` wrote to its usual place; None without one."""
        found = {int(match[1]): file.parent for file in self.exports.glob("step_*/config.json")
                 if (match := re.fullmatch(r"step_(\d+)", file.parent.name))}
        return found[max(found)] if found else None

    def best_step(self) -> int | None:
        """The best step of the run by best.json; None without the file."""
        return read_json(self.best_mark).get("step")

    def finished_stage(self) -> str | None:
        """The stage whose summary.json is here; None without a summary."""
        return read_json(self.summary).get("stage")

    def finished_well(self) -> bool:
        """Whether a summary says that the stage reached its last step."""
        summary = read_json(self.summary)
        return bool(summary) and "stopped_early" not in summary

    def write_json(self, name: str, value: Any) -> Path:
        """Write `value` as JSON to the file `name` of this directory; numbers that are not finite become null.

        Raises:
            SupersededError: another driver owns the directory now.
        """
        return self.write_text(name, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Write the file `name` of this directory; errors as in `write_json`."""
        target = self.path / name
        write_atomically(target, text.encode(), self.term)
        return target


def finite(value: Any) -> Any:
    """`value` with every float that JSON cannot hold replaced by None."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if hasattr(value, "item"):  # a numpy or torch scalar
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_writable(path: Path) -> None:
    try:
        try_to_write(path)
    except OSError as error:
        free = f"; {_free_mb(path)} MiB are free there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ConfigError(
            f"run.dir={str(path)!r} cannot be written: {error.strerror or error}{free}. "
            "Choose a run.dir on a disk that this user may write to"
        ) from error


def _check_space(path: Path, need_mb: int) -> None:
    if (free := _free_mb(path)) < need_mb:
        raise ConfigError(
            f"run.dir={str(path)!r} lies on a disk with {free} MiB free, and the run needs at least {need_mb} MiB "
            "(checkpoints come on top): make room, or choose another run.dir"
        )


def _free_mb(path: Path) -> int:
    return shutil.disk_usage(path).free // MIB


def read_json(file: Path) -> dict[str, Any]:
    """The contents of one of a run's JSON files; {} without the file.

    Raises:
        DataError: the file is damaged.
    """
    try:
        content = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise DataError(f"{file} cannot be read: {error}; fix or remove it") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} holds {type(content).__name__} where a mapping was expected; fix or remove it")
    return content
