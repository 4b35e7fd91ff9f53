"""Reads what supervised stages train on, so that the driver never holds it: rows go straight to the object store."""

from typing import Any

import numpy as np

from rlhf_ray.config.data import DemonstrationsConfig, PreferencesConfig, ProcessRowsConfig
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.config.ptx import PtxConfig
from rlhf_ray.config.steps import StepsConfig
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.pretraining import load_pretraining_text
from rlhf_ray.data.process_rows import StepRows, load_process_rows
from rlhf_ray.data.sequences import Pairs, Sequences
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.models.loading import load_tokenizer


class DataReader:
    """Every method returns the data first and what a person should know about it (row count, report) last."""

    def __init__(self, model: ModelConfig | NewModelConfig) -> None:
        self._model = model

    def start(self) -> dict[str, Any]:
        """Load the tokenizer."""
        self._tokenizer = load_tokenizer(self._model)
        return {"vocabulary": len(self._tokenizer), "digest": tokenizer_digest(self._tokenizer)}

    def demonstrations(self, config: DemonstrationsConfig) -> tuple[Sequences, Sequences, tuple[int, str]]:
        """Training rows, held-out rows (the last ones), the number of training rows and the loader's report."""
        rows, report = load_demonstrations(config, self._tokenizer)
        numbers, cut = np.arange(len(rows)), len(rows) - int(len(rows) * config.held_out)
        return rows.select(numbers[:cut]), rows.select(numbers[cut:]), (cut, str(report))

    def pretraining_text(self, config: PtxConfig) -> tuple[Sequences, str]:
        """Rows of pretraining text and the loader's report."""
        return load_pretraining_text(config, self._tokenizer)

    def preferences(self, config: PreferencesConfig) -> tuple[Pairs, Pairs, tuple[int, str]]:
        """Training pairs, held-out pairs, the number of training pairs and the loader's report."""
        train, held_out, report = load_preferences(config, self._tokenizer)
        return train, held_out, (len(train), str(report))

    def process_rows(
        self, config: ProcessRowsConfig, steps: StepsConfig
    ) -> tuple[StepRows, StepRows, tuple[int, str]]:
        """Training rows, held-out rows, the number of training rows and the loader's report."""
        train, held_out, report = load_process_rows(config, steps, self._tokenizer)
        return train, held_out, (len(train), str(report))
