"""Keeps the prompts of a run, on disk, and hands them out chunk by chunk: nobody else ever holds them all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.prompt_table import PromptRows, open_prompts
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts

HELD_OUT = "held_out"
"""The table of the rows that a section keeps out of training."""


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
