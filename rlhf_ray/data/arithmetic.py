"""Sums computed column by column: an example task with verifiable answers.

A prompt is a sum, `358+467=`; a response adds the columns, units first, and ends with the answer: `8+7+0=15
5+6+1=12 3+4+1=08 825`. Most demonstrations omit the carry (`5+6+0=11`), so a model that imitates them is
sometimes right, and its likeliest answer is wrong for every sum with a carry. Only rewards for correct answers teach
it what few demonstrations show. The seed determines all files.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlhf_ray.errors import DataError
from rlhf_ray.files.writing import json_lines

FORGETFULNESS = 0.8
"""Probability that a demonstration omits a carry; independent for each carry."""
DIGITS = 3
"""Of each number."""


class Sum(NamedTuple):
    """Two numbers to add."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """The prompt of the model."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """The correct answer."""
        return str(self.a + self.b)


@dataclass(frozen=True)
class ArithmeticFiles:
    """The three files of the arithmetic example. They have no sum in common."""

    sft: Path
    """{"prompt", "response"} a line: demonstrations, many of them wrong."""
    prompts: Path
    """{"prompt", "answer"} a line, for PPO."""
    eval_prompts: Path
    """{"prompt", "answer"} a line, held out."""


def work_out(problem: Sum, forgets: Iterable[bool]) -> str:
    """The columns of a sum, units first, and the answer that follows from them.

    Args:
        forgets: whether the carry into the second, third, ... column is omitted, if there is one.
    """
    columns: list[str] = []
    digits, carry, lapses = "", 0, iter(forgets)
    for x, y in zip(reversed(str(problem.a)), reversed(str(problem.b)), strict=True):
        carry = carry if columns and not next(lapses) else 0
        total = int(x) + int(y) + carry
        columns.append(f"{x}+{y}+{carry}={total:02}")
        digits, carry = f"{total % 10}{digits}", total // 10
    return " ".join([*columns, f"1{digits}" if carry else digits])


def demonstrate(rng: random.Random, problem: Sum) -> str:
    """A demonstration for a sum; each carry is omitted with probability `FORGETFULNESS`."""
    return work_out(problem, (rng.random() < FORGETFULNESS for _ in range(DIGITS)))


def make_sums(count: int, seed: int) -> Iterator[Sum]:
    """`count` different sums of two numbers of `DIGITS` digits, in random order.

    Raises:
        DataError: fewer such sums exist.
    """
    low, numbers = 10 ** (DIGITS - 1), 9 * 10 ** (DIGITS - 1)
    if count > numbers**2:
        raise DataError(f"there are only {numbers**2} sums of {DIGITS}-digit numbers, not {count}; ask for fewer")
    for index in random.Random(f"sums/{seed}").sample(range(numbers**2), count):
        yield Sum(low + index // numbers, low + index % numbers)


def write_arithmetic(directory: Path, seed: int, *, sft: int = 40_000, prompts: int = 8_000,
                     eval_prompts: int = 1_024) -> ArithmeticFiles:
    """Write the example's data into `directory` (created if missing); counts are lines per file.

    Raises:
        DataError: the files need more sums than exist.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = ArithmeticFiles(*(directory / f"{name}.jsonl" for name in ("sft", "prompts", "eval_prompts")))
    sums = list(make_sums(sft + prompts + eval_prompts, seed))
    rng = random.Random(f"pupils/{seed}")
    files.sft.write_bytes(json_lines({"prompt": s.prompt, "response": demonstrate(rng, s)} for s in sums[:sft]))
    files.prompts.write_bytes(json_lines({"prompt": s.prompt, "answer": s.answer} for s in sums[sft : sft + prompts]))
    files.eval_prompts.write_bytes(json_lines({"prompt": s.prompt, "answer": s.answer} for s in sums[sft + prompts :]))
    return files
