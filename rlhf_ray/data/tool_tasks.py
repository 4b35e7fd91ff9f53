"""Prices to look up and add: an example task that takes several turns and three tools.

A question, "How much are plum and pear?", names two items of a table that the prompt does not contain; every task has
a table of its own, so no price can be learned by heart. A right episode has five turns: `lookup` of each item,
`calculator`, `submit`, and a last word. Most demonstrations are hasty: they look up the first item twice, submit
a price for the sum, or calculate with names; a model that imitates them is seldom right, and its likeliest answer
never. The environment's own methods answer their calls. The seed determines all
files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from rlhf_ray.files.writing import json_lines

ITEMS = ("apple", "bean", "bread", "carrot", "cheese", "cherry", "corn", "egg", "fig", "garlic", "grape", "honey",
         "kiwi", "leek", "lemon", "lime", "mango", "melon", "milk", "nut", "oil", "olive", "onion", "pea", "peach",
         "pear", "plum", "potato", "rice", "salt", "tea", "tomato")
PRICES = range(10, 50)
STOCK = 6
"""Items in the table of a task."""
HELD_OUT = 48
"""Pairs of items that only the held-out questions name, of 496."""
HASTE = 0.6
"""Probability of each of the two mistakes of a demonstration that looks prices up: the likeliest is always wrong."""
GUESSES = 0.1
"""Probability that a demonstration calculates with names, reads an error, and guesses."""
LAST_WORD = "Done."
WORDS = (*ITEMS, *map(str, range(PRICES[0], 2 * PRICES[-1] + 1)))
"""Items and numbers: a token each, wherever they stand."""


@dataclass(frozen=True)
class Task:
    """Two items and a table."""

    first: str
    second: str
    prices: dict[str, int]
    """Item -> price; other items, too."""

    @property
    def prompt(self) -> list[dict[str, str]]:
        """What the model reads."""
        return [{"role": "user", "content": f"How much are {self.first} and {self.second}?"}]

    @property
    def columns(self) -> dict[str, Any]:
        """What the environment reads."""
        return {"prices": self.prices, "answer": self.prices[self.first] + self.prices[self.second]}


@dataclass(frozen=True)
class ToolTaskFiles:
    """The three files of the example. No pair of items of the held-out questions is in another file."""

    sft: Path
    """{"messages", "tools"} a line: demonstrations, most of them wrong."""
    prompts: Path
    """{"prompt", "prices", "answer"} a line."""
    eval_prompts: Path
    """The same, held out."""


def make_tasks(pairs: list[tuple[str, str]], count: int, rng: random.Random) -> Iterator[Task]:
    """`count` tasks that ask for these pairs in turn, each with a table of its own."""
    for i in range(count):
        first, second = pairs[i % len(pairs)]
        others = rng.sample([item for item in ITEMS if item not in (first, second)], STOCK - 2)
        stock = rng.sample([first, second, *others], STOCK)
        yield Task(first, second, dict(zip(stock, rng.sample(PRICES, STOCK), strict=True)))


class Player:
    """Plays one episode by a script, and writes it down as messages.

    Args:
        environment: the class of the environment.
    """

    def __init__(self, environment: Callable[[], Any], task: Task) -> None:
        self.environment = environment()
        self.environment.reset(**task.columns)
        self.messages: list[dict[str, Any]] = list(task.prompt)

    def call(self, tool: str, **arguments: Any) -> str:
        """What a tool answers, errors included, as the policy reads it."""
        try:
            result = getattr(self.environment, tool)(**arguments)
            answer = result if isinstance(result, str) else json.dumps(result)
        except Exception as error:  # as the policy of an episode reads it
            answer = f"Error: {type(error).__name__}: {error}"
        call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
        self.messages += [{"role": "assistant", "content": "", "tool_calls": [call]},
                          {"role": "tool", "name": tool, "content": answer}]
        return answer

    def end(self, total: str) -> list[dict[str, Any]]:
        """Submit an answer, and say the last word; returns the whole conversation."""
        self.call("submit", answer=int(total))
        return [*self.messages, {"role": "assistant", "content": LAST_WORD}]


def demonstrate(player: Player, task: Task, lapses: Iterator[bool]) -> list[dict[str, Any]]:
    """A conversation in which the first lapse looks the first item up twice, and the second leaves the sum out and
    submits a price."""
    first = player.call("lookup", item=task.first)
    second = player.call("lookup", item=task.first if next(lapses) else task.second)
    return player.end(second if next(lapses) else player.call("calculator", expression=f"{first}+{second}"))


def guess(player: Player, task: Task, rng: random.Random) -> list[dict[str, Any]]:
    """A conversation that looks nothing up."""
    player.call("calculator", expression=f"{task.first}+{task.second}")
    return player.end(str(rng.choice(PRICES) + rng.choice(PRICES)))


def write_tool_tasks(directory: Path, seed: int, environment: Callable[[], Any], tools: list[dict[str, Any]], *,
                     sft: int = 4_000, prompts: int = 8_000, eval_prompts: int = 512) -> ToolTaskFiles:
    """Write the example's data into `directory` (created if missing); counts are lines per file.

    Args:
        environment: the class whose methods answer the calls of demonstrations.
        tools: JSON schemas of its tools.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = ToolTaskFiles(*(directory / f"{name}.jsonl" for name in ("sft", "prompts", "eval_prompts")))
    rng = random.Random(f"tool tasks/{seed}")
    pairs = list(permutations(ITEMS, 2))
    rng.shuffle(pairs)
    held = {frozenset(pair) for pair in pairs[:HELD_OUT]}
    known = [pair for pair in pairs if frozenset(pair) not in held]
    asked = {True: [pair for pair in pairs if frozenset(pair) in held], False: known}

    def demonstration(task: Task) -> list[dict[str, Any]]:
        player = Player(environment, task)
        if rng.random() < GUESSES:
            return guess(player, task, rng)
        return demonstrate(player, task, iter([rng.random() < HASTE for _ in range(2)]))

    files.sft.write_bytes(json_lines(
        {"messages": demonstration(task), "tools": tools} for task in make_tasks(asked[False], sft, rng)))
    for file, count, held_out in ((files.prompts, prompts, False), (files.eval_prompts, eval_prompts, True)):
        file.write_bytes(json_lines(
            {"prompt": task.prompt, **task.columns} for task in make_tasks(asked[held_out], count, rng)))
    return files
