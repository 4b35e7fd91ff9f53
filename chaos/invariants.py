"""The invariants of a run with faults: functions that return a sentence for each one that does not hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from chaos.run_record import RunRecord
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import LedgerError, RLHFError
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.resumed import CLOCKS, TRAFFIC, samples, steps, without

TRIES = ("reward/failures/", "reward/failed_tries/")
"""Prefixes of the metrics that count failures of a reward service."""
REPAIRED = (*(f"{part}/{event}" for part in ("episodes", "eval")
              for event in ("retries", "interrupted", "continued", "restarted")), "samples/bytes")
"""Metrics that say what was repaired of episodes; the files of samples say it, too."""
EPISODES = "episodes"
"""Directory of the journals of episodes in that of the run."""
REFUSED_REASON = "answers 400"
"""Part of the reason for which the samples of a refused prompt are quarantined."""


@dataclass(frozen=True)
class Books:
    """Counts of a run's samples."""

    wanted: int
    """Samples that the run's updates need."""
    trained: int
    """Committed, or in an update that was not applied."""
    quarantined: int
    counted: int
    """Samples that the run's own summary counts as trained on."""
    again: int
    """Attempts that were given up."""
    filtered: int = 0
    """By dynamic sampling."""

    @property
    def lost(self) -> int:
        """Samples that are in no update."""
        return max(0, self.wanted - self.trained)

    @property
    def duplicated(self) -> int:
        """Samples that are in more than one update."""
        return max(0, self.counted - self.trained, self.trained - self.wanted)

    @classmethod
    def of(cls, record: RunRecord) -> Books:
        """Read them from the ledger; without one all samples count as lost."""
        config = load(PPOConfig, record.config, [])
        wanted = config.run.steps * config.coordinator.samples_per_step
        try:
            with closing(open_for_reading(RunDirectory(record.directory).ledger)) as db:
                states = counts(db)
        except LedgerError:
            return cls(0 if record.interruption else wanted, 0, 0, 0, 0)
        summary = RunDirectory(record.directory).summary
        trained = states["committed"] + states["not_applied"]
        counted = json.loads(summary.read_text())["samples"] if summary.exists() else trained
        if record.interruption is not None:
            wanted = trained = counted  # the last samples of an unfinished run are in no checkpoint
        return cls(wanted, trained, states["quarantined"], counted, states["attempts given up"], states["filtered"])


def violations(record: RunRecord, undisturbed: Path | None) -> list[str]:
    """The invariants that do not hold, a sentence each.

    Args:
        undisturbed: directory of the same run without faults, if the results must be the same bit for bit.
    """
    problems = list(_ends(record)) + record.left
    if record.interruption is not None:
        return [*problems, "the run was interrupted; its files were not checked"]
    try:
        problems += _books(record)
        problems += _rows(record)
        problems += _temporary(record.directory)
        problems += _journals(record.directory)
        if undisturbed is not None:
            problems += _differences(record.directory, undisturbed)
    except (RLHFError, OSError) as error:
        problems.append(f"the run's files cannot be read: {error}")
    return problems


def _ends(record: RunRecord) -> Iterator[str]:
    over = record.starts[:-1] if record.interruption else record.starts
    for number, start in enumerate(over, start=1):
        if start.wedged:
            yield f"start {number} made no progress and was killed: {start.last_words()}"
        elif start.code != start.expected:
            yield f"start {number} ended with {start.code} instead of {start.expected}: {start.last_words()}"


def _books(record: RunRecord) -> Iterator[str]:
    with closing(open_for_reading(RunDirectory(record.directory).ledger)) as db:
        yield from (f"ledger: {problem.invariant}: {problem.violation}" for problem in audit(db, ended=True))
    books = Books.of(record)
    if books.lost or books.duplicated:
        yield f"of {books.wanted} samples {books.lost} are lost and {books.duplicated} were trained on twice"
    yield from unexpected_quarantine(record)


def _rows(record: RunRecord) -> Iterator[str]:
    """Every update has one row, publishes the next version, and trains on no sample that is too old."""
    config, rows = load(PPOConfig, record.config, []), steps(record.directory)
    numbers = [row["step"] for row in rows]
    if numbers != list(range(1, config.run.steps + 1)):
        yield f"rows of metrics are of the updates {numbers}, not of each of {config.run.steps} once"
    if versions := [row["weights/version"] for row in rows if row["weights/version"] != row["step"]]:
        yield f"the updates published the versions {versions}, not their own numbers"
    oldest = max((row["staleness/max"] for row in rows), default=0)
    if oldest > config.coordinator.max_staleness:
        yield f"trained on samples of staleness {oldest}, {config.coordinator.max_staleness} is allowed"


def _temporary(directory: Path) -> Iterator[str]:
    for path in directory.rglob(".*"):
        if path.name.startswith((".tmp", ".old", ".del")):
            yield f"left behind: {path.relative_to(directory)}"


def _journals(directory: Path) -> Iterator[str]:
    """A run that is complete needs no journal of an episode any more."""
    for path in sorted((directory / EPISODES).rglob("*")):
        yield f"left behind: {path.relative_to(directory)}"


def _differences(directory: Path, undisturbed: Path) -> Iterator[str]:
    """Differences from the run without faults: weights, metrics of every step, the ledger's line of every sample."""
    for model in ("model", "model_ema"):
        one, other = (d / model / "model.safetensors" for d in (directory, undisturbed))
        if one.exists() != other.exists() or (one.exists() and one.read_bytes() != other.read_bytes()):
            yield f"{model}/model.safetensors is not that of the undisturbed run"
    mine, theirs = (without(read_metrics(d), *CLOCKS, TRAFFIC, *TRIES, *REPAIRED) for d in (directory, undisturbed))
    if mine != theirs:
        first = next((row["step"] for row, other in zip(mine, theirs, strict=False) if row != other), "the last")
        yield f"metrics differ from those of the undisturbed run, at step {first} first"
    if samples(directory) != samples(undisturbed):
        yield "the ledger differs from that of the undisturbed run"


def was_quarantined(record: RunRecord, prompt: str) -> bool:
    """Whether a row whose prompt begins like this is quarantined in the ledger, and in quarantine.jsonl."""
    return any(_begins(prompt, line) for line in _named(record))


def is_held_out(record: RunRecord, prompt: str) -> bool:
    """Whether a row whose prompt begins like this is one that the run is only measured on."""
    held_out = Path(yaml.safe_load(record.config.read_text())["evaluation"]["prompts"])
    return any(_begins(prompt, json.loads(line)) for line in held_out.read_text().splitlines())


def unexpected_quarantine(record: RunRecord) -> Iterator[str]:
    """Rows that are quarantined although their prompts were not refused, or that the run does not name."""
    refused = [line["prompt"] for line in record.injections.read("confirmed") if "prompt" in line]
    expected = {line["key"][1] for line in _named(record) if any(_begins(prompt, line) for prompt in refused)}
    if rows := _quarantined(record) - expected - _may_be_late(record):
        yield f"rows {sorted(rows)} are quarantined, but were not refused by the reward service or are not named"


def _named(record: RunRecord) -> list[dict[str, Any]]:
    """The lines of quarantine.jsonl about rows that are quarantined in the ledger because the service refused them."""
    file, rows = RunDirectory(record.directory).quarantine, _quarantined(record)
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [line for line in lines if line["key"][1] in rows and REFUSED_REASON in line["reason"]]


def _quarantined(record: RunRecord) -> set[int]:
    with closing(open_for_reading(RunDirectory(record.directory).ledger)) as db:
        return {row for (row,) in db.execute(
            "SELECT row FROM samples WHERE state = 'quarantined' UNION SELECT row FROM archived_quarantine")}


def _may_be_late(record: RunRecord) -> set[int]:
    """The rows whose episodes are quarantined where they are late before anything is sampled, by the configuration."""
    given = yaml.safe_load(record.config.read_text())
    masking = {name for name, environment in (given.get("environments") or {}).items()
               if environment["on_failure"].get("timeout", "mask") == "mask"}
    if not masking:
        return set()
    lines = Path(given["prompts"]["path"]).read_text().splitlines()
    return {row for row, line in enumerate(lines) if json.loads(line)["environment"] in masking}


def _begins(prompt: str, line: dict[str, Any]) -> bool:
    words = prompt.split()
    return bool(line["prompt"].split()[: len(words)] == words)
