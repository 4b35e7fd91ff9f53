"""`rlhf-ray example reasoning_gym`: a model learns sums that reasoning-gym makes and scores.

A small model imitates pupils who work a sum out term by term, and often misread a sign (SFT). Then only right answers
are rewarded, by the library; held-out questions measure it.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_ray.environments.protocol import Message
from rlhf_ray.stages.bundled_recipes import Recipe
from rlhf_ray.stages.example_stages import environment_of, make_demonstrations, run_stages, write_verdict

RECIPE = Recipe("examples/adapters/reasoning_gym", home="runs/reasoning_gym")
SHOWN = ("reward", "solved", "failed", "kl", "length")
FIRST, DEMONSTRATIONS = 100_000, 8_000
"""Index of the first question of a demonstration, far from those of training and evaluation; how many there are."""
MISREAD = 0.4
"""Probability that a pupil takes a plus for a minus, or a minus for a plus."""
NUMBERS = tuple(str(n) for n in range(-18, 28))
"""Terms and results: a token each, wherever they stand."""


def run(directory: Path, estimator: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Data, SFT, and reinforcement learning by `estimator` (a file of the recipe); finished stages are kept.

    Args:
        overrides: `--section.key=value` changes of the reinforcement learning.

    Returns:
        The contents of summary.json: success before and after, and seconds.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    run_dir, seconds = run_stages(RECIPE, "reasoning_gym", directory, seed, estimator, overrides, make_data)
    return write_verdict(directory, run_dir, seconds, "held-out questions right", SHOWN, {})


def make_data(directory: Path, seed: int) -> None:
    """Write demonstrations and a tokenizer with a chat template, unless they exist."""
    def solutions() -> Iterator[list[Message]]:
        environment = environment_of(RECIPE, "sums")
        rng = random.Random(f"solutions/{seed}")
        return (demonstrate(environment(), FIRST + i, rng) for i in range(DEMONSTRATIONS))

    make_demonstrations(directory, "writing solutions", solutions, NUMBERS)


def demonstrate(episode: Any, index: int, rng: random.Random) -> list[Message]:
    """A question, and how a pupil answers it."""
    messages = list(episode.reset(row={"prompt": "", "index": index}, seed=0).messages)
    [terms] = re.findall(r"(\d+(?: [+-] \d+)+) =", messages[-1]["content"])
    return [*messages, {"role": "assistant", "content": work_out(terms, rng)}]


def work_out(terms: str, rng: random.Random) -> str:
    """`4 - 1 + 7` term by term: "4 - 1 = 3, 3 + 7 = 10 <answer>10</answer>", in which signs may be others."""
    first, *others = terms.split(" ")
    result = int(first)
    steps = []
    for sign, term in zip(others[::2], others[1::2], strict=True):
        adds = (sign == "+") != (rng.random() < MISREAD)
        after = result + int(term) if adds else result - int(term)
        steps.append(f"{result} {'+' if adds else '-'} {term} = {after}")
        result = after
    return f"{', '.join(steps)} <answer>{result}</answer>"
