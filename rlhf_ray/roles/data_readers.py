"""Reads prompts and training rows in a worker process, so that the driver holds no data set (it reads one only to count
its rows for `run.epochs`, before the run)."""

from collections.abc import Mapping, Sequence
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
from rlhf_ray.config.rewards import RewardConfig
from rlhf_ray.data.contents import Contents
from rlhf_ray.data.demonstrations import load_demonstrations, load_pretraining_text
from rlhf_ray.data.held_out import split_held_out
from rlhf_ray.data.load_report import LeftOutRows, LoadReport, contents_of, left_out_of
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.prompt_table import PromptRows, open_prompts
from rlhf_ray.data.stepwise_format import StepTokens
from rlhf_ray.data.stepwise_supervision import StepRows, join_step_rows, load_process_rows
from rlhf_ray.data.supervised_records import Pairs, Sequences
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts
from rlhf_ray.rewards.answer_check import AnswerCheck

HELD_OUT = "held_out"
"""Name of the table with the rows held out of training."""


@dataclass(frozen=True)
class DataSummary:
    """Sizes and load reports of the training rows."""

    sizes: list[int]
    """Rows of each data set of a mix, in order."""
    weights: list[float]
    reports: list[str]
    """The load report of each data set, including dropped rows."""
    contents: Contents
    """Digest of the rows of each data set."""
    left_out: LeftOutRows
    """All rows that were left out."""

    @property
    def rows(self) -> int:
        """Rows of all data sets."""
        return sum(self.sizes)


class Reader:
    """Reads texts with a model's tokenizer."""

    def __init__(self, model: ModelConfig | NewModelConfig) -> None:
        self._model = model

    def start(self) -> None:
        """Load the tokenizer."""
        self._tokenizer = load_tokenizer(self._model)


class DataReader(Reader):
    """Reads the rows of supervised stages, which go directly to the object store. Data methods return training rows,
    held-out rows and a summary."""

    def demonstrations(self, config: DemonstrationsConfig) -> tuple[Sequences, Sequences, DataSummary]:
        """Demonstrations; the last rows of each data set are the held-out rows."""
        train, held_out, reports = [], [], []
        for part in config.parts():
            rows, report = load_demonstrations(part, self._tokenizer, model=self._model)
            share = max(1, round(len(rows) * config.held_out)) if config.held_out else 0  # at least one to measure on
            numbers, cut = np.arange(len(rows)), max(1, len(rows) - share)
            train.append(rows.select(numbers[:cut]))
            held_out.append(rows.select(numbers[cut:]))
            report.held_out = len(rows) - cut
            reports.append(report)
        return Sequences.concat(train), Sequences.concat(held_out), _summary(config, train, reports)

    def pretraining_text(self, config: PtxConfig) -> tuple[Sequences, DataSummary]:
        """Rows of pretraining text."""
        loaded = [load_pretraining_text(part, self._tokenizer) for part in config.parts()]
        rows, reports = (list(column) for column in zip(*loaded, strict=True))
        return Sequences.concat(rows), _summary(config, rows, reports)

    def preferences(self, config: PreferencesConfig) -> tuple[Pairs, Pairs, DataSummary]:
        """Preference pairs."""
        loaded = [load_preferences(part, self._tokenizer, model=self._model) for part in config.parts()]
        train, held_out, reports = split_held_out(loaded, config)
        return Pairs.concat(train), Pairs.concat(held_out), _summary(config, train, reports)

    def process_rows(self, config: ProcessRowsConfig, steps: StepsConfig) -> tuple[StepRows, StepRows, DataSummary]:
        """Solutions with labelled steps."""
        loaded = [load_process_rows(part, steps, self._tokenizer) for part in config.parts()]
        train, held_out, reports = split_held_out(loaded, config)
        good = StepTokens.of(steps, self._tokenizer).good
        return join_step_rows(train, good), join_step_rows(held_out, good), _summary(config, train, reports)


def _summary(config: DataSection, train: list[Any], reports: list[LoadReport]) -> DataSummary:
    """The summary of the training rows of each data set."""
    return DataSummary([len(rows) for rows in train], config.weights, [str(report) for report in reports],
                       contents_of(reports), left_out_of(reports))


class PromptReader(Reader):
    """Keeps a run's tokenised prompts on disk, in tables by name, and returns them chunk by chunk.

    Args:
        directory: where the tables' files are stored; they disappear with the process, see `data.prompt_table`.
        rewards: by their names in messages; rows need what they read.
    """

    def __init__(self, model: ModelConfig, directory: Path | None = None,
                 rewards: Mapping[str, RewardConfig] | None = None) -> None:
        super().__init__(model)
        self._directory = directory
        self._checks = [AnswerCheck(name, name, reward).row for name, reward in (rewards or {}).items()]
        self._tables: dict[str, PromptRows] = {}

    def open(self, table: str, config: PromptsConfig) -> dict[str, Any]:
        """Tokenise a section's data and keep it as the table `table`, and its held-out rows as "held_out".

        Raises:
            DataError, ModelError: as `open_prompts`; also for rows without what a reward reads.

        Returns:
            sizes (rows of each data set), held_out (held-out rows of each), reports (load report of each data set),
            contents (their digests), left_out (all rows that were left out), bytes (on disk) and chat (whether the
            first prompt is a conversation).
        """
        opened = open_prompts(config, self._tokenizer, self._directory, self._checks)
        self._tables[table] = opened.training
        if len(opened.held_out):
            self._tables[HELD_OUT] = opened.held_out
        return {"sizes": opened.training.sizes, "held_out": opened.held_out.sizes,
                "bytes": opened.training.table.nbytes, "reports": [str(report) for report in opened.reports],
                "contents": contents_of(opened.reports),
                "left_out": left_out_of(opened.reports),
                "chat": opened.training.rows([0]).messages is not None}

    def rows(self, numbers: Sequence[int], table: str = "training") -> Prompts:
        """The rows with these numbers, in this order.

        Raises:
            DataError: there is no such row.
        """
        return self._tables[table].rows(numbers)
