"""Sums with every column judged: step labels for the arithmetic example, known exactly instead of collected.

A step is a column, or the answer at the end. *Hard* labels say whether the step is the one of the right working. *Soft*
labels are what Monte-Carlo estimation (Wang et al. 2024, Math-Shepherd, section 3.3) would approach with ever more
completions: the probability that the pupil of `arithmetic`, going on from there, arrives at the right answer.
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
"""Share of steps that go wrong in some other way than by a forgotten carry."""


def right_steps(problem: Sum) -> list[str]:
    """The right working of a sum, step by step."""
    return work_out(problem, [False] * DIGITS).split(SEPARATOR)


def hard_labels(problem: Sum, steps: Sequence[str]) -> list[bool]:
    """[S] whether each step is the one of the right working. Steps beyond its length are wrong."""
    right = right_steps(problem)
    return [i < len(right) and step == right[i] for i, step in enumerate(steps)]


def soft_labels(problem: Sum, steps: Sequence[str]) -> list[float]:
    """[S] probability that a pupil who stands behind each step ends with the right answer: 0 after a wrong step, else
    the chance that it remembers every carry still due."""
    columns = right_steps(problem)[:DIGITS]
    due = [column.split("+")[2].startswith("1") for column in columns]  # "5+6+1=12" adds a carry
    labels, right = [], True
    for i, good in enumerate(hard_labels(problem, steps)):
        right = right and good
        labels.append((1 - FORGETFULNESS) ** sum(due[i + 1 :]) if right else 0.0)
    return labels


def right_share(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """[N] right steps of each response, over its steps or those of the right working, whichever are more.

    A reward function (`rewards: {NAME: {type: function}}`) to measure by: what a reward model says of steps may be
    gamed, this may not.
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
    """Somebody's working of a sum: half the carries that are due are forgotten, and now and then a step slips."""
    steps = work_out(problem, [rng.random() < 0.5 for _ in range(DIGITS)]).split(SEPARATOR)
    return [slip(rng, step) if rng.random() < SLIPS else step for step in steps]


def slip(rng: random.Random, step: str) -> str:
    """A step gone wrong in a way that no pupil's does: a judge that a policy is trained against should know more errors
    than the policy begins with."""
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
