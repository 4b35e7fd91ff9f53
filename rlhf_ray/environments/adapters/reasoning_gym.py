"""Tasks of reasoning-gym: `environments.NAME.reasoning_gym`. The library makes the questions and scores the answers
(reasoning-gym 0.1.25, `reasoning_gym/factory.py`, `dataset.py` and `utils.py`)."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping
from typing import Any

from rlhf_ray.environments.adapters.library import imported, opening
from rlhf_ray.environments.protocol import Reply, Start, Step
from rlhf_ray.user_code.loading import brief

SLOT = "{question}"
RIGHT = 1.0
"""The score of a right answer; the library's are from 0 to 1."""


def make(settings: Mapping[str, Any]) -> type:
    """The class of an environment in messages, from the fields of `ReasoningGymSource`.

    Raises:
        ImportError: the package is missing.
        ValueError: there is no such task or system prompt, or the task refuses its settings.
    """
    library = imported("reasoning_gym", "reasoning-gym")
    tools = imported("reasoning_gym.utils", "reasoning-gym")
    tasks = _tasks(library, settings["task"], settings["settings"])
    system = _system(tools.SYSTEM_PROMPTS, settings["system"])
    lock = threading.Lock()  # some tasks keep a generator of random numbers, and episodes have threads of their own

    class ReasoningGym:
        """One question."""

        def reset(self, row: dict[str, Any], seed: int) -> Start:
            index = _index(row, seed % len(tasks))
            with lock:
                self.item = _item(tasks, index)
            self.tried = 0
            messages = opening(row.get("prompt"), SLOT, SLOT, self.item["question"])
            if system and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system})
            return Start(messages)

        def step(self, reply: Reply) -> Step:
            self.tried += 1
            answer = reply.content.strip() if settings["answer"] == "text" else tools.extract_answer(reply.content)
            with lock:
                score = float(tasks.score_answer(answer, self.item))
            info = {"score": score, "tries": self.tried}
            if score >= RIGHT or self.tried >= settings["tries"]:
                return Step(reward=score, done=True, info=info)
            said = "That is not right. Try again."
            if answer is None:
                said = "There is no answer within <answer> and </answer>. Try again."
            return Step([{"role": "user", "content": said}], info=info)

    return ReasoningGym


def _tasks(library: Any, name: str, settings: Mapping[str, Any]) -> Any:
    known = library.factory.DATASETS
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        raise ValueError(f"reasoning-gym has no task {name!r}; "
                         + (f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(known))}"))
    try:
        return library.create_dataset(name, **{"seed": 0, **settings})
    except Exception as error:  # an assertion, or whatever the task raises
        raise ValueError(f"the task {name} of reasoning-gym cannot be made with settings={dict(settings)}: "
                         f"{type(error).__name__}: {error}") from error


def _system(prompts: Mapping[str, str], name: str | None) -> str:
    if name is not None and name not in prompts:
        raise ValueError(f"reasoning-gym has no system prompt {name!r}; it has {', '.join(prompts)}")
    return "" if name is None else prompts[name].strip()


def _index(row: Mapping[str, Any], otherwise: int) -> int:
    index = row.get("index", otherwise)
    if type(index) is not int or index < 0:
        raise ValueError(f"the row has index={brief(index)}, which must be a number of an item, from 0 on")
    return index


def _item(tasks: Any, index: int) -> dict[str, Any]:
    try:
        return dict(tasks[index])
    except IndexError:
        raise ValueError(f"the task has no item {index}, only the {len(tasks)} of settings.size; raise that, or use "
                         "rows with a smaller index") from None
