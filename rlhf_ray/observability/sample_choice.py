"""Which of a run's saved samples are asked for: by step, prompt, cause, reward and length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.observability.conversation import turns_of
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sample_files import SHOWN, read_samples, steps_with_samples
from rlhf_ray.observability.tables import counted

STEPS_SEARCHED = 5
"""Newest steps with samples that are asked for, of which they are taken."""


class NumberRange(NamedTuple):
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> NumberRange:
        """"1" is one number, "0..1" a range, "..1" and "0.." are open at one end.

        Raises:
            ConfigError: it is none of these, or contains no number.
        """
        first, dots, last = text.strip().partition("..")
        try:
            low = float(first) if first else -math.inf
            high = (float(last) if last else math.inf) if dots else low
        except ValueError:
            low = high = math.nan
        if not low <= high or not text.strip():
            raise ConfigError(f"{text!r} is no range: write a number, LOW..HIGH with LOW up to HIGH, LOW.. or ..HIGH")
        return cls(low, high)

    def has(self, value: float | None) -> bool:
        """Whether a number is in the range; one that is missing is in none."""
        return value is not None and self.low <= value <= self.high

    def __str__(self) -> str:
        low, high = (f"{end:g}" if math.isfinite(end) else "" for end in self)
        return low if low == high and low else f"{low}..{high}"


@dataclass(frozen=True)
class Choice:
    """Conditions that a sample meets. None: any."""

    steps: NumberRange | None = None
    """By default the newest step; where another condition is given, the newest `STEPS_SEARCHED` steps that have such
    samples."""
    prompt: str | None = None
    """A text in the prompt, in upper or lower case."""
    causes: tuple[str, ...] = ()
    """Why its episode ended; empty for any. A single response has no cause."""
    reward: NumberRange | None = None
    length: NumberRange | None = None
    """Of the number of tokens that the policy sampled."""

    @property
    def is_open(self) -> bool:
        """Whether every sample meets all conditions but that of the step."""
        return replace(self, steps=None) == Choice()

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that the conditions read."""
        return (*SHOWN, "cause", *(["response_mask"] if self.length is not None else []))

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Whether a saved sample meets the conditions, of which that of the step is left out."""
        return ((self.prompt is None or any(self.prompt.casefold() in turn.text.casefold() for turn in turns_of(row)))
                and (not self.causes or row.get("cause") in self.causes)
                and (self.reward is None or self.reward.has(row["score"]))
                and (self.length is None or self.length.has(sum(row["response_mask"]))))

    def __str__(self) -> str:
        words = [f"a prompt that contains {self.prompt!r}" if self.prompt is not None else "",
                 f"the cause {' or '.join(self.causes)}" if self.causes else "",
                 f"a reward in {self.reward}" if self.reward is not None else "",
                 f"a length in {self.length}" if self.length is not None else ""]
        return " and ".join(word for word in words if word)


def rows_of(run_dir: Path, choice: Choice) -> Iterator[dict[str, Any]]:
    """The chosen samples of a run, step by step in the order of the batch. A run may be writing more.

    Raises:
        DataError: there are none; says why.
    """
    run = RunDirectory(run_dir)
    found = False
    for step in _steps(run, choice):
        for row in read_samples(run.samples, step):
            if choice.takes(row):
                found = True
                yield row
    if not found:
        raise DataError(_nothing_found(run, choice))


def _nothing_found(run: RunDirectory, choice: Choice) -> str:
    """That no sample meets the conditions, and which causes there are."""
    steps = steps_with_samples(run.samples)
    searched = counted(len(steps), "step") if choice.steps is None else f"step {choice.steps}"
    message = f"no sample of {searched} in {run.samples} has {choice}"
    if not choice.causes:
        return message
    causes = sorted({row["cause"] for row in read_samples(run.samples, steps[-1], ["cause"]) if row.get("cause")})
    return f"{message}; step {steps[-1]} has " + (
        f"the causes {', '.join(causes)}" if causes else "single responses, which have no cause")


def _steps(run: RunDirectory, choice: Choice) -> list[int]:
    """The steps that are read, in order."""
    steps = steps_with_samples(run.samples)
    if not steps:
        raise DataError(f"{run.path} has no samples: no step is finished yet, the run was started with "
                        "logging.samples=off, or the stage generates none")
    if choice.steps is not None:
        within = [step for step in steps if choice.steps.has(step)]
        if not within:
            raise DataError(f"{run.samples} has no samples of step {choice.steps}; it has those of "
                            f"{counted(len(steps), 'step')} from {steps[0]} to {steps[-1]}")
        return within
    if choice.is_open:
        return steps[-1:]
    wanted: list[int] = []
    for step in reversed(steps):
        if any(choice.takes(row) for row in read_samples(run.samples, step, choice.columns)):
            wanted.insert(0, step)
        if len(wanted) == STEPS_SEARCHED:
            break
    return wanted
