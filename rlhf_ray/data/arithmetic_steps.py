"""Exact step labels for the arithmetic example.

A step is a column, or the answer at the end. *Hard* labels: whether the step is that of the correct solution. *Soft*
labels are the limit of Monte-Carlo estimation (Wang et al. 2024, Math-Shepherd, section 3.3) with infinitely many
completions: the probability that a demonstration of `arithmetic`, continued from this step, ends with the correct
answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlhf_ray.data.arithmetic import DIGITS, FORGETFULNESS, Sum, work_out
from rlhf_ray.files.writing import json_lines

SEPARATOR = " "
SLIPS = 0.1
"""Share of steps with an error other than an omitted carry."""


def right_steps(problem: Sum) -> list[str]:
    """The steps of the correct solution of a sum."""
    return work_out(problem, [False] * DIGITS).split(SEPARATOR)


def hard_labels(problem: Sum, steps: Sequence[str]) -> list[bool]:
    """[S] whether each step is that of the correct solution. Steps beyond its length are wrong."""
    right = right_steps(problem)
    return [i < len(right) and step == right[i] for i, step in enumerate(steps)]


def soft_labels(problem: Sum, steps: Sequence[str]) -> list[float]:
    """[S] probability that a demonstration, continued after each step, ends with the correct answer: 0 after a wrong
    step, else the probability that it omits none of the remaining carries."""
    columns = right_steps(problem)[:DIGITS]
    due = [column.split("+")[2].startswith("1") for column in columns]  # "5+6+1=12" adds a carry
    labels, right = [], True
    for i, good in enumerate(hard_labels(problem, steps)):
        right = right and good
        labels.append((1 - FORGETFULNESS) ** sum(due[i + 1 :]) if right else 0.0)
    return labels


def right_share(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """[N] correct steps of each response, divided by its number of steps or that of the correct solution, if larger.

    A reward function (`rewards: {NAME: {type: function}}`) for measurements: unlike a reward model's scores of steps,
    it cannot be gamed.
    """
    shares = []
    for prompt, response in zip(prompts, responses, strict=True):
        problem = sum_of(prompt)
        labels = hard_labels(problem, response.split(SEPARATOR))
        shares.append(sum(labels) / max(len(labels), len(right_steps(problem))))
    return shares


def sum_of(prompt: str) -> Sum:
    """The sum that a prompt such as `358+467=` asks for."""
    a, b = prompt.removesuffix("=").split("+")
    return Sum(int(a), int(b))


def sums_in(file: Path) -> list[Sum]:
    """The sums of a file with a column `prompt`."""
    return [sum_of(json.loads(line)["prompt"]) for line in file.read_text(encoding="utf-8").splitlines()]


def attempt(rng: random.Random, problem: Sum) -> list[str]:
    """An attempt at a sum: each carry is omitted with probability 0.5, and a share `SLIPS` of steps is altered."""
    steps = work_out(problem, [rng.random() < 0.5 for _ in range(DIGITS)]).split(SEPARATOR)
    return [slip(rng, step) if rng.random() < SLIPS else step for step in steps]


def slip(rng: random.Random, step: str) -> str:
    """A step with an error that no demonstration has: a reward model should know more errors than the policy makes at
    the start of training."""
    place = rng.randrange(len(step))
    x, y = rng.randrange(10), rng.randrange(10)
    return rng.choice([
        step[:place] + rng.choice("0123456789") + step[place + 1 :],
        step[:place] + step[place + 1 :],
        f"{x}+{y}+0={x + y:02}",
        rng.choice("0123456789"),
    ]) or "0"


def write_steps(directory: Path, problems: Iterable[Sum], seed: int) -> tuple[Path, Path]:
    """Write hard_steps.jsonl and soft_steps.jsonl, {"prompt", "steps", "labels"} a line: one attempt at each sum, the
    same in both files. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"attempts/{seed}")
    worked = [(problem, attempt(rng, problem)) for problem in problems]
    paths = directory / "hard_steps.jsonl", directory / "soft_steps.jsonl"
    for path, label in zip(paths, (hard_labels, soft_labels), strict=True):
        lines = ({"prompt": p.prompt, "steps": steps, "labels": label(p, steps)} for p, steps in worked)
        path.write_bytes(json_lines(lines))
    return paths
