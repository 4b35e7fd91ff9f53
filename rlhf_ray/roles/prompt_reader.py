"""Keeps the prompts of a run, on disk, and hands them out chunk by chunk: nobody else ever holds them all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.prompt_table import PromptTable, open_prompts
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts


class PromptReader:
    """Tables of tokenised prompts by name.

    Args:
        directory: a place on a disk for the tables' bytes, which vanish with the process; see `data.prompt_table`.
    """

    def __init__(self, model: ModelConfig, directory: Path | None = None) -> None:
        self._model, self._directory = model, directory
        self._tables: dict[str, PromptTable] = {}

    def start(self) -> dict[str, Any]:
        """Load the tokenizer."""
        self._tokenizer = load_tokenizer(self._model)
        return {"vocabulary": len(self._tokenizer), "digest": tokenizer_digest(self._tokenizer)}

    def open(self, table: str, config: PromptsConfig) -> tuple[int, str]:
        """Tokenise a data set and keep it under the name `table`; returns its row count and the loader's report."""
        self._tables[table], report = open_prompts(config, self._tokenizer, self._directory)
        return len(self._tables[table]), str(report)

    def rows(self, numbers: Sequence[int], table: str = "training") -> Prompts:
        """The rows of these numbers, in this order.

        Raises:
            DataError: no such row.
        """
        return self._tables[table].rows(numbers)
