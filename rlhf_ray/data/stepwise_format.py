"""Tokenization of a solution in steps, for training a process reward model and for scoring with it.

A row is the prompt, then each step with the placeholder after it, with the separator between one placeholder and the
next step. Steps are tokenized one by one, so a step's tokens never depend on the steps before and after it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from rlhf_ray.config.data import StepsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.encoding import encode, encode_after_text
from rlhf_ray.errors import ModelError
from rlhf_ray.models.hub import file_from_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "process_reward.json"
"""File with the `StepsConfig` of a process reward model, in the folder of its weights."""


@dataclass(frozen=True)
class StepTokens:
    """A `StepsConfig` in the ids of one tokenizer."""

    placeholder: int
    good: int
    bad: int
    separator: list[int]
    others: tuple[int, ...] = ()
    values: tuple[float, ...] = (1.0, 0.0)
    """How good a step with each of `labels` is, from 0 to 1."""

    @property
    def labels(self) -> list[int]:
        """Ids of all label tokens: good, bad, others."""
        return [self.good, self.bad, *self.others]

    @classmethod
    def of(cls, steps: StepsConfig, tokenizer: PreTrainedTokenizerBase) -> StepTokens:
        """Look up the ids.

        Raises:
            ModelError: the placeholder or a label's text is not a single token, or two of them are the same token.
        """
        texts = {name: getattr(steps, name) for name in ("placeholder", "good", "bad")}
        ids = {name: _single_token(tokenizer, name, text) for name, text in texts.items()}
        others = {f"others[{text!r}]": _single_token(tokenizer, "others", text) for text in steps.others}
        if len({*ids.values(), *others.values()}) < len(ids) + len(others):
            raise ModelError(f"steps.placeholder, good, bad and others are the tokens {ids | others}; they must all be "
                             "different")
        return cls(**ids, separator=encode_after_text(tokenizer, [steps.separator])[0],
                   others=tuple(others.values()), values=(1.0, 0.0, *steps.others.values()))

    def rows(
        self, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], solutions: list[list[str]]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """([N] token ids, [N] positions of the placeholders in them, one per step).

        Args:
            prompts: [N] token ids.
            solutions: [N] texts of the steps, without separators.
        """
        encoded = iter(encode_after_text(tokenizer, list(chain.from_iterable(solutions))))
        rows, places = [], []
        for prompt, solution in zip(prompts, solutions, strict=True):
            row, marks = list(prompt), []
            for number in range(len(solution)):
                row += [*(self.separator if number else []), *next(encoded), self.placeholder]
                marks.append(len(row) - 1)
            rows.append(row)
            places.append(marks)
        return rows, places


def save_steps(steps: StepsConfig, directory: Path) -> None:
    """Write the format into the folder of a model's weights."""
    (directory / FILE).write_text(json.dumps(steps.model_dump(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_steps(model: ModelConfig, field: str) -> StepsConfig:
    """The format that `save_steps` wrote into a model's directory, or that is in the model's repository on the Hub.

    Raises:
        ModelError: the file is missing or damaged; names the configuration field.
    """
    file = Path(model.path) / FILE
    values = None
    try:
        if not file.parent.is_dir():
            values = file_from_hub(model, FILE)
        elif file.is_file():
            values = json.loads(file.read_text(encoding="utf-8"))
        if values is not None:
            return StepsConfig.model_validate(values)
    except (ValueError, ValidationError) as error:
        raise ModelError(f"{file} is not the step format of a process reward model; fix the file: {error}") from None
    raise ModelError(f"{field}.path={model.path!r} has no {FILE}, which names the token at which the model judges a "
                     "step. Train one with `rlhf-ray process-reward`; for another process reward model, write the "
                     'file yourself: {"placeholder": ..., "good": ..., "bad": ..., "separator": ...}')


def _single_token(tokenizer: PreTrainedTokenizerBase, name: str, text: str) -> int:
    """The id of a single-token text.

    Raises:
        ModelError: the text is not a single token.
    """
    known = tokenizer.get_vocab().get(text)
    ids = [known] if known is not None else encode(tokenizer, [text], leading=False)[0]
    if len(ids) != 1 or tokenizer.decode(ids).strip() != text.strip():
        raise ModelError(f"steps.{name}={text!r} is not a single token of "
                         f"{tokenizer.name_or_path or 'the tokenizer'} (its ids: {ids}); choose a text that is one, "
                         "such as a special token or a rare character")
    return int(ids[0])
