"""Reads what supervised stages train on, so that the driver never holds it: rows go straight to the object store."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_ray.config.algorithm import PtxConfig
from rlhf_ray.config.data import (
    DataSection,
    DemonstrationsConfig,
    PreferencesConfig,
    ProcessRowsConfig,
    PromptsConfig,
    StepsConfig,
)
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.data.demonstrations import load_demonstrations, load_pretraining_text
from rlhf_ray.data.load_report import LoadReport
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.process_rows import StepRows, join_step_rows, load_process_rows
from rlhf_ray.data.prompt_table import PromptRows, open_prompts
from rlhf_ray.data.sequences import Pairs, Sequences
from rlhf_ray.data.step_format import StepTokens
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts

HELD_OUT = "held_out"
"""The table of the rows that a section keeps out of training."""


@dataclass(frozen=True)
class DataSummary:
    """What a person and a learner's cursor should know about the rows to train on."""

    sizes: list[int]
    """Rows of each data set of a mix, one data set after another."""
    weights: list[float]
    reports: list[str]
    """What was left out of each."""

    @property
    def rows(self) -> int:
        """Rows of all data sets."""
        return sum(self.sizes)


class DataReader:
    """Every method returns training rows, held-out rows, and a summary."""

    def __init__(self, model: ModelConfig | NewModelConfig) -> None:
        self._model = model

    def start(self) -> dict[str, Any]:
        """Load the tokenizer."""
        self._tokenizer = load_tokenizer(self._model)
        return {"vocabulary": len(self._tokenizer), "digest": tokenizer_digest(self._tokenizer)}

    def demonstrations(self, config: DemonstrationsConfig) -> tuple[Sequences, Sequences, DataSummary]:
        """Demonstrations; the last rows of each data set are held out."""
        train, held_out, reports = [], [], []
        for part in config.parts():
            rows, report = load_demonstrations(part, self._tokenizer)
            numbers, cut = np.arange(len(rows)), len(rows) - int(len(rows) * config.held_out)
            train.append(rows.select(numbers[:cut]))
            held_out.append(rows.select(numbers[cut:]))
            report.held_out = len(rows) - cut
            reports.append(report)
        return Sequences.concat(train), Sequences.concat(held_out), summary(config, train, reports)

    def pretraining_text(self, config: PtxConfig) -> tuple[Sequences, str]:
        """Rows of pretraining text and the loader's report."""
        return load_pretraining_text(config, self._tokenizer)

    def preferences(self, config: PreferencesConfig) -> tuple[Pairs, Pairs, DataSummary]:
        """Preference pairs."""
        loaded = [load_preferences(part, self._tokenizer) for part in config.parts()]
        train, held_out, reports = (list(column) for column in zip(*loaded, strict=True))
        return Pairs.concat(train), Pairs.concat(held_out), summary(config, train, reports)

    def process_rows(self, config: ProcessRowsConfig, steps: StepsConfig) -> tuple[StepRows, StepRows, DataSummary]:
        """Solutions in judged steps."""
        loaded = [load_process_rows(part, steps, self._tokenizer) for part in config.parts()]
        train, held_out, reports = (list(column) for column in zip(*loaded, strict=True))
        good = StepTokens.of(steps, self._tokenizer).good
        return join_step_rows(train, good), join_step_rows(held_out, good), summary(config, train, reports)


def summary(config: DataSection, train: list[Any], reports: list[LoadReport]) -> DataSummary:
    """The summary of the training rows of each data set."""
    return DataSummary([len(rows) for rows in train], config.weights, [str(report) for report in reports])


class PromptReader:
    """Tables of tokenised prompts by name.

    Args:
        directory: a place on a disk for the tables' bytes, which vanish with the process; see `data.prompt_table`.
    """

    def __init__(self, model: ModelConfig, directory: Path | None = None) -> None:
        self._model, self._directory = model, directory
        self._tables: dict[str, PromptRows] = {}

    def start(self) -> dict[str, Any]:
        """Load the tokenizer."""
        self._tokenizer = load_tokenizer(self._model)
        return {"vocabulary": len(self._tokenizer), "digest": tokenizer_digest(self._tokenizer)}

    def open(self, table: str, config: PromptsConfig) -> dict[str, Any]:
        """Tokenise a section's data and keep it under the name `table`, and the rows held out of it under "held_out".

        Returns:
            sizes (rows of each data set), held_out (rows of that table), reports (what was left out of each) and bytes
            (on disk).
        """
        found = open_prompts(config, self._tokenizer, self._directory)
        self._tables[table] = found.training
        if len(found.held_out):
            self._tables[HELD_OUT] = found.held_out
        return {"sizes": found.training.sizes, "held_out": len(found.held_out), "bytes": found.training.table.nbytes,
                "reports": [str(report) for report in found.reports]}

    def rows(self, numbers: Sequence[int], table: str = "training") -> Prompts:
        """The rows of these numbers, in this order.

        Raises:
            DataError: no such row.
        """
        return self._tables[table].rows(numbers)
