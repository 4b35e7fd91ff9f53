"""Sums worked out column by column: an example task whose answers can be checked.

A prompt is a sum, `358+467=`; a response adds the columns, units first, and ends with the answer: `8+7+0=15
5+6+1=12 3+4+1=08 825`. The demonstrations come from pupils who usually forget the carry (`5+6+0=11`), so a model that
imitates them is right now and then, and its likeliest answer is wrong wherever a carry is due.
Rewards for right answers alone must teach it what few demonstrations show. Everything follows from the seed.
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
"""Chance that a demonstration forgets a carry that is due; each time anew."""
DIGITS = 3
"""Of each number."""


class Sum(NamedTuple):
    """Two numbers to add."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """What the model is given."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """The right answer."""
        return str(self.a + self.b)


@dataclass(frozen=True)
class ArithmeticFiles:
    """The three files of the arithmetic example. No sum is in two of them."""

    sft: Path
    """{"prompt", "response"} a line: demonstrations, many of them wrong."""
    prompts: Path
    """{"prompt", "answer"} a line, to learn from rewards."""
    eval_prompts: Path
    """{"prompt", "answer"} a line, held out."""


def work_out(problem: Sum, forgets: Iterable[bool]) -> str:
    """The columns of a sum, units first, and the answer they lead to.

    Args:
        forgets: whether the carry into the second, third, ... column is forgotten if one is due.
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
    """A pupil's work, with whatever carries it forgot."""
    return work_out(problem, (rng.random() < FORGETFULNESS for _ in range(DIGITS)))


def make_sums(count: int, seed: int) -> Iterator[Sum]:
    """`count` different sums of two numbers of `DIGITS` digits, in random order.

    Raises:
        DataError: there are not that many.
    """
    low, numbers = 10 ** (DIGITS - 1), 9 * 10 ** (DIGITS - 1)
    if count > numbers**2:
        raise DataError(f"there are only {numbers**2} sums of {DIGITS}-digit numbers, not {count}; ask for fewer")
    for index in random.Random(f"sums/{seed}").sample(range(numbers**2), count):
        yield Sum(low + index // numbers, low + index % numbers)


def write_arithmetic(directory: Path, seed: int, *, sft: int = 40_000, prompts: int = 8_000,
                     eval_prompts: int = 1_024) -> ArithmeticFiles:
    """Write the example's data into `directory` (made if missing); counts are lines per file.

    Raises:
        DataError: more sums asked for than there are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = ArithmeticFiles(*(directory / f"{name}.jsonl" for name in ("sft", "prompts", "eval_prompts")))
    sums = list(make_sums(sft + prompts + eval_prompts, seed))
    rng = random.Random(f"pupils/{seed}")
    files.sft.write_bytes(json_lines({"prompt": s.prompt, "response": demonstrate(rng, s)} for s in sums[:sft]))
    files.prompts.write_bytes(json_lines({"prompt": s.prompt, "answer": s.answer} for s in sums[sft : sft + prompts]))
    files.eval_prompts.write_bytes(json_lines({"prompt": s.prompt, "answer": s.answer} for s in sums[sft + prompts :]))
    return files
