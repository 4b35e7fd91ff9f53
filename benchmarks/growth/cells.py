"""The cells of the grid: measured process by process, kept on disk, and not measured twice."""

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.growth.measured_role import Role
from benchmarks.growth.roles import ROLES
from benchmarks.growth.settings import CELL_S, PROMPT, Size, settings
from benchmarks.growth.workload import make_models
from benchmarks.side_process import SideFailed, SideProcess

FILE = "growth.json"


@dataclass(frozen=True)
class Cell:
    """One activity of one role, at one size and length."""

    size: str
    parameters: int
    role: str
    activity: str
    length: int
    """Response tokens of a row; 0 for activities that do not depend on it."""
    samples: int
    """Rows of one repeat; 1 for activities that have none."""
    seconds: list[float]
    """CPU seconds of each repeat; empty where the cell was skipped because it would have taken longer than `CELL_S`."""
    peak_mib: float
    """Highest resident memory of the role's process meanwhile."""
    cpu_share: float = 1.0
    """CPU time over wall time: well below 1, others ran, and shared caches and memory bandwidth with it."""

    @property
    def seconds_per_sample(self) -> float:
        """Median over the repeats; seconds of the whole activity where there are no samples."""
        return median(self.seconds) / self.samples

    @property
    def seconds_per_token(self) -> float:
        """Prompt tokens counted, except by generation, whose work is nearly all in the response's."""
        return self.seconds_per_sample / (self.length + (0 if self.activity == "generation" else PROMPT))


def make_apart(directory: Path, size: Size) -> None:
    """Make the models in a process of its own.

    Raises:
        SideFailed: that did not work.
    """
    process = multiprocessing.get_context("spawn").Process(target=make_models, args=(directory, size), daemon=True)
    process.start()
    process.join(300)
    if process.exitcode != 0:
        process.kill()
        raise SideFailed(f"making the models of {size.name} ended with {process.exitcode}; see the message above")


def role_cells(name: str, role: type[Role], size: Size, directory: Path) -> Iterator[Cell]:
    """The cells of one role, from a process of its own.

    Raises:
        SideFailed: the role failed.
    """
    with SideProcess(f"{name} at {size.name}", partial(role, size), directory) as process:
        for activity, length in role.tasks():
            peak, share, *seconds = process.turn(4 * CELL_S).proof
            samples = role.samples(size, (activity, length))
            yield Cell(size.name, size.parameters, name, activity, length, samples, seconds, peak, share)


class Study:
    """What is measured so far, in a file."""

    def __init__(self, directory: Path) -> None:
        """Take up what `directory` holds, if it was measured under the present settings."""
        self.path = directory / FILE
        self.cells: list[Cell] = []
        self.runs: list[dict[str, Any]] = []
        told = json.loads(self.path.read_text()) if self.path.exists() else {}
        if told and told["settings"] != settings():
            print(f"{self.path} was measured with other settings and is begun anew", file=sys.stderr)
        elif told:
            self.cells, self.runs = [Cell(**cell) for cell in told["cells"]], told["runs"]

    def has(self, size: Size, role: str) -> bool:
        """Whether a role's cells are there."""
        return any(cell.size == size.name and cell.role == role for cell in self.cells)

    def add(self, cells: Sequence[Cell], run: dict[str, Any]) -> None:
        """Take in a role's cells, with what is to be known of the run that measured them, and write the file."""
        self.cells += cells
        self.runs += [] if run in self.runs else [run]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        told = {"settings": settings(), "cells": [asdict(cell) for cell in self.cells], "runs": self.runs}
        self.path.write_text(json.dumps(told, indent=1) + "\n")


def complete(study: Study, size: Size, run: dict[str, Any]) -> Iterator[str]:
    """Measure the roles at one size that the study does not have; gives each role's name before its turn.

    Raises:
        SideFailed: a role failed; what was measured before is kept.
    """
    missing = {name: role for name, role in ROLES.items() if not study.has(size, name)}
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-growth-") as temporary:
        make_apart(Path(temporary), size)
        for name, role in missing.items():
            yield name
            study.add(list(role_cells(name, role, size, Path(temporary))), run)
