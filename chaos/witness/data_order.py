"""Which prompts a run must train on, in which order: an enumeration of its data, apart from the system's data cursor.

As documented (docs/architecture.md): rows are the prompts of the file that are not too long, numbered in file order.
Each epoch visits every row once, in the order of as many raw words of numpy's Philox generator, whose seed is (run
seed, epoch). Epochs follow one another, and updates consume prompts in this order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np

Tokens = tuple[int, ...]


class DataOrder:
    """The rows of a file of prompts, and the order in which a run visits them.

    Raises:
        ValueError: a prompt is the beginning of another one, so that a sample does not tell which was its prompt.
    """

    def __init__(self, prompts: Sequence[Tokens], seed: int) -> None:
        self.prompts, self._seed = list(prompts), seed
        self._rows = {prompt: row for row, prompt in enumerate(self.prompts)}
        self._lengths = sorted({len(prompt) for prompt in self.prompts})
        known = set(self._rows)
        if len(known) < len(self.prompts) or any(prompt[:end] in known for prompt in known for end in
                                                 range(1, len(prompt))):
            raise ValueError("the prompts are not unique: a sample does not tell its prompt")

    @classmethod
    def read(cls, path: Path, most_tokens: int, seed: int) -> DataOrder:
        """The order of a file of prompts. The words of the tiny models' tokenizer are named after their token ids."""
        words = [json.loads(line)["prompt"].split() for line in path.read_text().splitlines()]
        prompts = [tuple(int(word.removeprefix("w")) for word in prompt) for prompt in words]
        return cls([prompt for prompt in prompts if len(prompt) <= most_tokens], seed)

    def visits(self) -> Iterator[int]:
        """The rows in the order of their visits, without end."""
        for epoch in count():
            words = np.random.Philox(seed=[self._seed, epoch]).random_raw(len(self.prompts)).tolist()
            yield from sorted(range(len(self.prompts)), key=words.__getitem__)

    def row_of(self, sample: Tokens) -> int | None:
        """The row of the prompt that a sample's tokens begin with; None if there is none."""
        prefixes = (sample[:length] for length in self._lengths)
        return next((self._rows[prefix] for prefix in prefixes if prefix in self._rows), None)

    def beginning_with(self, prefix: Tokens) -> set[int]:
        """The rows of the prompts that begin with some tokens."""
        return {row for row, prompt in enumerate(self.prompts) if prompt[: len(prefix)] == prefix}
