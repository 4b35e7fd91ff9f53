"""The surviving history of a learner's rank: its journal without the work that a restart made void.

A process that starts has the initial weights; one that loads a checkpoint has those after the update of its manifest.
Whatever a rank had done beyond that is void, and is done again. Lines of a process whose successor has started are void
too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.witness.data_order import Tokens


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of a rank."""

    index: int
    """Within its update, from 0."""
    applied: bool
    rows: list[Tokens]
    """Tokens of each row that this rank fed forward."""
    masked: list[Tokens] = field(default_factory=list)
    """Tokens of the rows that it left out because they belong to masked episodes; on the first rank."""


@dataclass
class Update:
    """One update of a rank."""

    number: int
    began: float
    """When its first optimizer step was over; `ended` is the time of its end."""
    steps: list[OptimizerStep] = field(default_factory=list)
    ended: float = float("inf")
    before: str = ""
    """Digest of the weights from which it began; empty if it did not end. `weights` is the digest of its result."""
    weights: str = ""
    batch: list[dict[str, Any]] = field(default_factory=list)
    """Its samples, on the first rank of the policy."""


@dataclass
class History:
    """What of a rank's work is part of its weights."""

    updates: dict[int, list[Update]] = field(default_factory=dict)
    """By number; an update that was made twice has two entries."""
    initial: str = ""
    """Digest of the weights from which the run began."""
    problems: list[str] = field(default_factory=list)
    """Where the weights are not those that this history leads to."""

    def weights_after(self, update: int) -> str:
        """Digest of the weights after an update; of the initial weights for 0; empty if it was not made."""
        if not update:
            return self.initial
        return self.updates[update][-1].weights if update in self.updates else ""

    def cut(self, update: int) -> None:
        """Remove everything after an update."""
        self.updates = {number: entries for number, entries in self.updates.items() if number <= update}

    def in_order(self) -> Iterator[Update]:
        """The updates by number."""
        for number in sorted(self.updates):
            yield from self.updates[number]


def surviving(lines: Sequence[dict[str, Any]]) -> History:
    """The surviving history in the lines of a rank's journal."""
    history, life, fresh = History(), "", False
    update: Update | None = None
    for line in lines:
        if line["event"] == "start":
            life, fresh, update = line["life"], True, None
            history.initial = history.initial or line["weights"]
            if line["weights"] != history.initial:
                history.problems.append("a restarted process began with other initial weights")
        elif line["life"] != life:
            continue
        elif line["event"] == "load":
            history.cut(line["step"])
            fresh, update = False, None
            if line["weights"] != history.weights_after(line["step"]):
                history.problems.append(f"the checkpoint of step {line['step']} had other weights than those after "
                                        f"update {line['step']}")
        elif line["event"] == "fed":
            if fresh:
                history.cut(0)
                fresh = False
            if update is None or update.number != line["update"]:
                update = Update(line["update"], line["time"])
                history.updates.setdefault(update.number, []).append(update)
            update.steps.append(OptimizerStep(line["index"], line["applied"], [tuple(row) for row in line["rows"]],
                                              [tuple(row) for row in line.get("masked", [])]))
            update.batch += line.get("batch", [])
        elif line["event"] == "update" and update is not None:
            update.before, update.weights, update.ended = line["before"], line["weights"], line["time"]
            update = None
    history.problems += _breaks(history)
    return history


def _breaks(history: History) -> Iterator[str]:
    """Updates that did not end, or did not begin from the weights in which the one before ended."""
    weights = history.initial
    for update in history.in_order():
        if not update.weights:
            yield f"update {update.number} did not end"
        elif update.before != weights:
            yield f"update {update.number} began from other weights than those before it"
        weights = update.weights
