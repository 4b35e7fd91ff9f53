"""`rlhf-ray example frozen_lake`: a model learns to cross the lake of gymnasium's FrozenLake, which it reads as text.

A small model imitates careless walks (SFT): many of their steps are random, and most end in a hole. Then only reaching
the goal is rewarded, by the environment itself.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_ray.environments.protocol import Message, Reply
from rlhf_ray.stages.bundled_recipes import Recipe
from rlhf_ray.stages.example_stages import environment_of, make_demonstrations, run_stages, write_verdict

RECIPE = Recipe("examples/adapters/frozen_lake", home="runs/frozen_lake")
SHOWN = ("reward", "solved", "failed", "turns", "invalid_action", "kl", "length")
MOVES = ("left", "down", "right", "up")
WALKS = 3_000
CARELESS = 0.5
"""Probability that a step of a walk is random."""
TOWARDS_GOAL = {0: ("down", "right"), 1: ("right",), 2: ("down",), 3: ("left",), 4: ("down",), 6: ("down",),
                8: ("right",), 9: ("down", "right"), 10: ("down",), 13: ("right",), 14: ("right",)}
"""The steps of shortest ways, by place: row * 4 + column of the drawing."""


def run(directory: Path, estimator: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Data, SFT, and reinforcement learning by `estimator` (a file of the recipe); finished stages are kept.

    Args:
        overrides: `--section.key=value` changes of the reinforcement learning.

    Returns:
        The contents of summary.json: success before and after, the mean turns after it, and seconds.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    run_dir, seconds = run_stages(RECIPE, "frozen_lake", directory, seed, estimator, overrides, make_data)
    return write_verdict(directory, run_dir, seconds, "the walks reach the goal", SHOWN, {"turns_mean": "turns"})


def make_data(directory: Path, seed: int) -> None:
    """Write demonstrations and a tokenizer with a chat template, unless they exist."""
    def walks() -> Iterator[list[Message]]:
        environment = environment_of(RECIPE, "lake")
        rng = random.Random(f"walks/{seed}")
        return (walk(environment(), rng) for _ in range(WALKS))

    make_demonstrations(directory, "walking on the ice", walks, MOVES)


def walk(episode: Any, rng: random.Random, most: int = 12) -> list[Message]:
    """A careless walk of at most so many steps, as a conversation that ends with the last step."""
    messages = list(episode.reset(row={"prompt": ""}, seed=0).messages)
    while True:
        moves = TOWARDS_GOAL[place(messages[-1]["content"])]
        move = rng.choice(MOVES if rng.random() < CARELESS else moves)
        messages.append({"role": "assistant", "content": move})
        step = episode.step(Reply(move, move))
        if step.done or step.truncated or len(messages) >= 2 * most:
            episode.close()
            return messages
        messages += step.messages


def place(drawn: str) -> int:
    """Where the walker is in a drawing of the lake."""
    return "".join(drawn.splitlines()[-4:]).index("[")
