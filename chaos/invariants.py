"""What must hold of a run afterwards, whatever it met; each that does not is a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from chaos.refusals import others_left
from chaos.supervisor import ChaosRun
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import LedgerError, RLHFError
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.resumed import CLOCKS, TRAFFIC, samples, steps, without

TRIES = ("reward/failures/", "reward/failed_tries/")
"""Beginnings of the names of metrics that count what a reward service did wrong."""


@dataclass(frozen=True)
class Books:
    """What became of a run's samples."""

    wanted: int
    """Samples that the run's updates are made of."""
    trained: int
    """Committed, or of an update that changed nothing."""
    quarantined: int
    counted: int
    """Samples that the run itself says it trained on."""
    again: int
    """Attempts that came to nothing."""

    @property
    def lost(self) -> int:
        """Samples that no update was made with."""
        return max(0, self.wanted - self.trained)

    @property
    def duplicated(self) -> int:
        """Samples that an update was made with although another had been."""
        return max(0, self.counted - self.trained, self.trained - self.wanted)

    @classmethod
    def of(cls, record: ChaosRun) -> Books:
        """Read them; a run that left none has lost everything."""
        config = load(PPOConfig, record.config, [])
        wanted = config.run.steps * config.samples_per_step
        try:
            with closing(open_for_reading(RunDirectory(record.directory).ledger)) as db:
                found = counts(db)
        except LedgerError:
            return cls(0 if record.interruption else wanted, 0, 0, 0, 0)
        summary = RunDirectory(record.directory).summary
        trained = found["committed"] + found["not_applied"]
        counted = json.loads(summary.read_text())["samples"] if summary.exists() else trained
        if record.interruption is not None:
            wanted = trained = counted  # it is not over, and its last samples are in no checkpoint
        return cls(wanted, trained, found["quarantined"], counted, found["attempts given up"])


def broken(record: ChaosRun, undisturbed: Path | None) -> list[str]:
    """The invariants that do not hold.

    Args:
        undisturbed: directory of the same run without a fault, where results must be the same to the bit.
    """
    found = list(_ends(record)) + record.left
    if record.interruption is not None:
        return [*found, "the run was interrupted; of what it left nothing was looked at"]
    try:
        found += _books(record)
        found += _rows(record)
        found += _temporary(record.directory)
        if undisturbed is not None:
            found += _differences(record.directory, undisturbed)
    except (RLHFError, OSError) as error:
        found.append(f"what the run left cannot be read: {error}")
    return found


def _ends(record: ChaosRun) -> Iterator[str]:
    over = record.starts[:-1] if record.interruption else record.starts
    for number, start in enumerate(over, start=1):
        if start.wedged:
            yield f"start {number} made no progress and was killed: {start.last_words()}"
        elif start.code != start.expected:
            yield f"start {number} ended with {start.code} instead of {start.expected}: {start.last_words()}"


def _books(record: ChaosRun) -> Iterator[str]:
    with closing(open_for_reading(RunDirectory(record.directory).ledger)) as db:
        yield from (f"ledger: {problem.invariant}: {problem.found}" for problem in audit(db, ended=True))
    books = Books.of(record)
    if books.lost or books.duplicated:
        yield f"of {books.wanted} samples {books.lost} are lost and {books.duplicated} were trained on twice"
    yield from others_left(record)


def _rows(record: ChaosRun) -> Iterator[str]:
    """Every update has its row, publishes the next version, and trains on nothing too old."""
    config, rows = load(PPOConfig, record.config, []), steps(record.directory)
    numbers = [row["step"] for row in rows]
    if numbers != list(range(1, config.run.steps + 1)):
        yield f"rows of metrics are of the updates {numbers}, not of each of {config.run.steps} once"
    if versions := [row["weights/version"] for row in rows if row["weights/version"] != row["step"]]:
        yield f"versions {versions} do not belong to their updates"
    oldest = max((row["staleness/max"] for row in rows), default=0)
    if oldest > config.coordinator.max_staleness:
        yield f"trained on samples of staleness {oldest}, {config.coordinator.max_staleness} is allowed"


def _temporary(directory: Path) -> Iterator[str]:
    for path in directory.rglob(".*"):
        if path.name.startswith((".tmp", ".old", ".del")):
            yield f"left behind: {path.relative_to(directory)}"


def _differences(directory: Path, undisturbed: Path) -> Iterator[str]:
    """From the run without a fault: weights, numbers of every step, what became of every sample."""
    for model in ("model", "model_ema"):
        one, other = (d / model / "model.safetensors" for d in (directory, undisturbed))
        if one.exists() != other.exists() or (one.exists() and one.read_bytes() != other.read_bytes()):
            yield f"{model}/model.safetensors is not that of the undisturbed run"
    mine, theirs = (without(read_metrics(d), *CLOCKS, TRAFFIC, *TRIES) for d in (directory, undisturbed))
    if mine != theirs:
        first = next((row["step"] for row, other in zip(mine, theirs, strict=False) if row != other), "the last")
        yield f"metrics differ from those of the undisturbed run, at step {first} first"
    if samples(directory) != samples(undisturbed):
        yield "the ledger does not tell the same of every sample as that of the undisturbed run"
