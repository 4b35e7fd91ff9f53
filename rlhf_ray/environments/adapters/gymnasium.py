"""Environments of gymnasium as text: `environments.NAME.gymnasium`. Their API is that of gymnasium 1.4
(https://gymnasium.farama.org/api/env/)."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from rlhf_ray.environments.adapters.library import imported, opening
from rlhf_ray.environments.protocol import Message, Reply, Start, Step

MOST_NUMBERS = 1024
"""Numbers of an observation that a policy may be given to read. A picture has more."""
LONGEST_SHOWN = 60
"""Characters of what the policy wrote that it is shown again."""
DIGITS = 4
"""Significant digits of a number."""
SLOT = "{observation}"
COLOURS = dict(zip(range(8), ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white"), strict=True))
"""Of ANSI's codes, 30 + n for characters and 40 + n for what is behind them, by the names of gymnasium's `colorize`."""
_CODE = re.compile(r"\x1b\[([\d;]*)m")


def make(settings: Mapping[str, Any]) -> type:
    """The class of an environment in messages, from the fields of `GymnasiumSource`.

    Raises:
        ImportError: the package is missing.
        ValueError: there is no such environment, or its spaces cannot be written as text.
    """
    gymnasium = imported("gymnasium", "gymnasium")
    sys.path.append(os.getcwd())  # for `module:name`
    options = dict(settings["options"])
    first = _made(gymnasium, settings["id"], options)
    try:
        if settings["rendering"] and "ansi" in first.metadata.get("render_modes", []):
            options["render_mode"] = "ansi"
        elif problem := unreadable(first.observation_space):
            raise ValueError(f"{settings['id']}: its observations cannot be written as text: {problem}. Use another "
                             "environment, or wrap it in one with observations of a Text space")
        actions = Actions(first.action_space, settings["actions"], settings["id"])
    finally:
        first.close()
    rules = settings["prompt"] or f"You act in {settings['id']}. {actions.form}"

    class Gymnasium:
        """One episode."""

        world: Any = None

        def reset(self, row: dict[str, Any], seed: int) -> Start:
            self.invalid = 0
            self.world = gymnasium.make(settings["id"], **options)
            observation, _ = self.world.reset(seed=seed)
            return Start(opening(row.get("prompt"), rules, SLOT, self.written(observation)))

        def step(self, reply: Reply) -> Step:
            try:
                action = actions.read(reply.content)
            except ValueError as error:
                self.invalid += 1
                return Step(_says(f"{error} {actions.form}"), info={"invalid_action": self.invalid})
            observation, reward, terminated, truncated, info = self.world.step(action)
            return Step(_says(self.written(observation)), float(reward), bool(terminated),
                        bool(truncated) and not terminated, {**info, "invalid_action": self.invalid})

        def written(self, observation: Any) -> str:
            if "render_mode" in options:
                return without_colours(str(self.world.render())).strip("\n")
            return as_text(self.world.observation_space, observation)

        def close(self) -> None:
            if self.world is not None:
                self.world.close()

    return Gymnasium


def _made(gymnasium: Any, name: str, options: dict[str, Any]) -> Any:
    try:
        return gymnasium.make(name, **options)
    except Exception as error:  # gymnasium's own, and whatever the environment raises
        raise ValueError(f"gymnasium.make({name!r}{''.join(f', {k}={v!r}' for k, v in options.items())}) failed: "
                         f"{type(error).__name__}: {error}") from error


def _says(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def unreadable(space: Any) -> str:
    """Why observations of a space cannot be written as text; "" if they can."""
    kind = type(space).__name__
    if kind == "Box":
        if space.dtype.name == "uint8" and len(space.shape) == 3:
            return f"Box of shape {space.shape} and type uint8 is a picture"
        numbers = math.prod(space.shape)
        return f"Box of shape {space.shape} has {numbers} numbers, more than {MOST_NUMBERS}" * (numbers > MOST_NUMBERS)
    if kind in ("MultiDiscrete", "MultiBinary"):
        numbers = math.prod(space.shape)
        return f"{kind} of shape {space.shape} has {numbers} numbers, more than {MOST_NUMBERS}" * (
            numbers > MOST_NUMBERS)
    if kind in ("Dict", "Tuple"):
        inner = space.spaces.values() if kind == "Dict" else space.spaces
        return next(filter(None, map(unreadable, inner)), "")
    return "" if kind in ("Discrete", "Text") else f"its space is {kind}"


def as_text(space: Any, observation: Any) -> str:
    """An observation as the policy reads it: a number, a text, or JSON."""
    plain = _plain(space, observation)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(space: Any, value: Any) -> Any:
    kind = type(space).__name__
    if kind == "Dict":
        return {name: _plain(inner, value[name]) for name, inner in space.spaces.items()}
    if kind == "Tuple":
        return [_plain(inner, each) for inner, each in zip(space.spaces, value, strict=True)]
    if kind == "Text":
        return str(value)
    return _rounded(value.tolist() if hasattr(value, "tolist") else value)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def without_colours(drawn: str) -> str:
    """A drawing whose colours are written: [S] for a character with one, where there is one colour, and [blue B] where
    there are several, because they mean different things then."""
    several = len({code for code in _CODE.findall(drawn) if code not in ("", "0")}) > 1

    def written(match: re.Match[str]) -> str:
        if match[1] in ("", "0"):
            return "]"
        return f"[{_colour(match[1])} " if several else "["

    return _CODE.sub(written, drawn)


def _colour(code: str) -> str:
    numbers = [int(each) for each in code.split(";") if each]
    return next((COLOURS[n % 10] for n in numbers if n // 10 in (3, 4) and n % 10 in COLOURS), code)


class Actions:
    """How actions of a space are written and read."""

    def __init__(self, space: Any, names: list[str], who: str) -> None:
        """
        Args:
            names: of the actions of a Discrete space, in order; empty for numbers.

        Raises:
            ValueError: the space has other actions, or none that can be written.
        """
        self._space = space
        self._kind = type(space).__name__
        if self._kind not in ("Discrete", "Text", "Box", "MultiDiscrete", "MultiBinary"):
            raise ValueError(f"{who}: its actions cannot be written as text: its action space is {space}. Use another "
                             "environment, or wrap it in one whose action space is Discrete or Text")
        if names and self._kind != "Discrete":
            raise ValueError(f"{who}: actions={names} names the actions of a Discrete space, and its action space is "
                             f"{space}; leave actions out")
        if names and len(names) != space.n:
            raise ValueError(f"{who}: actions={names} has {len(names)} names, and there are {space.n} actions")
        first = int(space.start) if self._kind == "Discrete" else 0
        self._numbers = {name.lower(): first + i for i, name in enumerate(names)}
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        number = r"-?\d+(?![\w]|\.\d)"
        self._action = re.compile(rf"(?<![\w.-])(?:{number}|(?:{words})(?!\w))" if names else rf"(?<![\w.-]){number}",
                                  re.IGNORECASE)
        self.form = self._form(names, first)
        """A sentence about what an action looks like."""

    def _form(self, names: list[str], first: int) -> str:
        space = self._space
        if names:
            return f"Write one of the actions: {', '.join(names)}."
        if self._kind == "Discrete":
            return f"Write the number of an action, from {first} to {first + int(space.n) - 1}."
        if self._kind == "Text":
            return f"Write a text of {space.min_length} to {space.max_length} characters."
        if self._kind == "MultiDiscrete":
            return f"Write a list of numbers, each from 0 and below those of {json.dumps(space.nvec.tolist())}."
        if self._kind == "MultiBinary":
            return f"Write a list of 0 and 1 of the shape {list(space.shape)}."
        low, high = (as_text(space, edge) for edge in (space.low, space.high))
        return f"Write a list of numbers from {low} to {high}."

    def read(self, text: str) -> Any:
        """The action that a text has: the last one, where there are several.

        Raises:
            ValueError: it has none, or none of the space.
        """
        if self._kind == "Discrete":
            found = self._action.findall(text)
            if not found:
                raise ValueError(f"There is no action in {_shown(text)}.")
            named = self._numbers.get(found[-1].lower())
            action: Any = int(found[-1]) if named is None else named
        elif self._kind == "Text":
            action = text.strip()
        else:
            action = self._array(text)
        return self._of_space(action, text)

    def _array(self, text: str) -> Any:
        import numpy as np

        found, position, decoder = None, text.find("["), json.JSONDecoder()
        while position >= 0:
            try:
                found, end = decoder.raw_decode(text, position)
            except ValueError:
                end = position + 1
            position = text.find("[", end)
        if found is None:
            raise ValueError(f"There is no list in {_shown(text)}.")
        try:
            array = np.array(found)
            if array.dtype.kind not in "iuf" or (self._kind != "Box" and array.dtype.kind == "f"):
                raise ValueError
            return array.astype(self._space.dtype)
        except (ValueError, OverflowError):  # lists of several lengths; numbers that are too large
            raise ValueError(f"{_shown(json.dumps(found))} is no action.") from None

    def _of_space(self, action: Any, text: str) -> Any:
        import numpy as np

        given = np.int64(action) if isinstance(action, int) and abs(action) < 2**63 else action
        if isinstance(given, int) or not self._space.contains(given):
            raise ValueError(f"{_shown(text)} is no action.")
        return given


def _shown(text: str) -> str:
    """The end of a text, where an action is expected."""
    return repr(text if len(text) <= LONGEST_SHOWN else f"...{text[-LONGEST_SHOWN:]}")
