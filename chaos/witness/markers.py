"""Marks in what an environment lets the policy read, by which the tokens of a segment say to which episode they belong.

A mark names the row, the seed of the environment, how many turns the environment has answered, and a digest of what
the policy wrote in them. The environments of these runs (`chaos.environments`) put one at the end of each message. So
a segment that contains the mark of turn 2 follows another one that ends with the turn whose digest it names.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

PATTERN = re.compile(r"\[(\d+) ([0-9a-f]{6}) (\d+) ([0-9a-f]{6})\]")
TAGS = re.compile("</?think>")
FIRST_DIGEST = "0" * 6
"""Of an episode in which nothing is written yet."""


class Mark(NamedTuple):
    """A place in an episode."""

    row: int
    seed: str
    """Six letters for the seed of the environment."""
    turn: int
    """How many turns precede it."""
    digest: str
    """Of what the policy wrote in them."""

    def __str__(self) -> str:
        return f"[{self.row} {self.seed} {self.turn} {self.digest}]"

    def after(self, text: str) -> Mark:
        """The place after one more turn, in which the policy wrote this."""
        return self._replace(turn=self.turn + 1, digest=_digest(f"{self.digest}/{legible(text)}"))


def first_mark(row: int, seed: int) -> Mark:
    """The place where an episode begins."""
    return Mark(row, _digest(str(seed)), 0, FIRST_DIGEST)


def marks_in(text: str) -> list[tuple[Mark, int]]:
    """All marks in a text, and where each ends."""
    return [(Mark(int(row), seed, int(turn), digest), found.end())
            for found in PATTERN.finditer(text) for row, seed, turn, digest in [found.groups()]]


def legible(text: str) -> str:
    """Its printable ASCII: the rest depends on how much is decoded together, where a token is a part of a letter.
    Blanks and the tags of reasoning are left out, which an agent does not read: it gets a turn in parts."""
    return "".join(letter for letter in TAGS.sub("", text) if "!" <= letter <= "~")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
