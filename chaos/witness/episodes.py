"""Samples that are episodes: to which sample a row of tokens belongs, and whether all segments of a sample are there.

As the environments of these runs mark what the policy reads (`markers`), a row says where in which episode it ends:
after its last mark stands what the policy wrote then. The environments' journals say how they answered that: an answer
of the role "user" makes the chat template write the history again, so that another segment must follow, which begins
where this one ends; after an answer of the role "tool" the same segment goes on. A turn that no environment answered is
the last one of its episode.

Two samples of a prompt meet the same environment. They are told apart by what the policy wrote; where that is the same,
their tokens are, too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from chaos.witness.data_order import DataOrder, Tokens
from chaos.witness.journals import ANSWERED, STALLED
from chaos.witness.markers import Mark, legible, marks_in

TURN = "<|im_start|>assistant\n"
"""How the chat template of these runs opens a turn of the policy."""
RESULT, END = "<|im_start|>user\n<tool_response>", "<|im_end|>\n"
"""How it opens the answer of a tool, and what stands before that if the turn has not ended with it."""
USER = "user"


@dataclass(frozen=True)
class Segment:
    """What a row of tokens is."""

    begins: Mark
    """Before its first turn: the last mark that an earlier segment, or the environment's reset, has led to."""
    ends: tuple[Mark, ...]
    """The place after its last turn, with and without the token that ended it."""
    turns: tuple[tuple[Mark, frozenset[str]], ...] = ()
    """Of each turn the place before it, and what the policy wrote, legibly: with and without the token that ended it,
    where that is not known."""


@dataclass
class Assembled:
    """The samples that some rows are."""

    whole: Counter[int | None] = field(default_factory=Counter)
    """How many samples of each row of the data are there with all their segments; None for rows of no sample."""
    again: Counter[int | None] = field(default_factory=Counter)
    """How many segments are there once more than their sample needs, by the row of the data."""
    partial: Counter[int | None] = field(default_factory=Counter)
    """How many segments are there of samples that lack another one."""
    turns: list[list[tuple[Mark, frozenset[str]]]] = field(default_factory=list)
    """Of each whole sample its turns, as `Segment.turns`."""


class EpisodeOrder(DataOrder):
    """The rows of a file of prompts of which each is the beginning of episodes.

    Args:
        rows: the columns of each row; "environment" names its own.
        tokenizer: of the model.
        answers: the lines of the environments' journals.
        masking: names of the environments whose late episodes are masked.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], seed: int, tokenizer: Any,
                 answers: Iterable[Mapping[str, Any]] = (), masking: Iterable[str] = ()) -> None:
        super().__init__([(number,) for number in range(len(rows))], seed)
        self._rows_of_data, self._tokenizer, self._masking = list(rows), tokenizer, set(masking)
        self._answers: dict[Mark, tuple[bool, str]] = {}
        self._stalled: set[tuple[int, str]] = set()
        for line in answers:
            if line["event"] == ANSWERED:
                self._answers[Mark(*line["mark"])] = line["done"], line["role"]
            elif line["event"] == STALLED:
                mark = Mark(*line["mark"])
                self._stalled.add((mark.row, mark.seed))
        self._read: dict[Tokens, Segment | None] = {}

    @classmethod
    def of(cls, path: Path, seed: int, model: Path, answers: Iterable[Mapping[str, Any]],
           environments: Mapping[str, Mapping[str, Any]]) -> EpisodeOrder:
        """Of a run's configuration."""
        from transformers import AutoTokenizer

        masking = [name for name, given in environments.items()
                   if given.get("on_failure", {}).get("timeout", "mask") == "mask"]
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return cls(rows, seed, AutoTokenizer.from_pretrained(model), answers, masking)

    @property
    def may_be_late(self) -> set[int]:
        """Rows whose episodes are masked if they are late, or quarantined if nothing had been sampled then."""
        return {row for row, columns in enumerate(self._rows_of_data) if columns["environment"] in self._masking}

    def rows_in(self, environments: Container[str]) -> set[int]:
        """Rows of some environments."""
        return {row for row, columns in enumerate(self._rows_of_data) if columns["environment"] in environments}

    def row_of(self, sample: Tokens) -> int | None:
        """The row that a segment belongs to; None if it is none."""
        found = self.segment(sample)
        return None if found is None else found.begins.row

    def beginning_with(self, prefix: Tokens) -> set[int]:
        """The row of a sample with these tokens."""
        row = self.row_of(prefix)
        return set() if row is None else {row}

    def segments_of(self, sample: Tokens) -> list[Tokens]:
        """The segments of a sample whose tokens follow one another, as the reward service gets them: each begins with
        the same prompt."""
        opening = self._opening
        end = next((at for at in range(len(sample)) if sample[at : at + len(opening)] == opening), 0) + len(opening)
        prompt = sample[:end]
        begins = [at for at in range(len(sample)) if sample[at : at + end] == prompt]
        return [sample[begin:stop] for begin, stop in zip(begins, [*begins[1:], len(sample)], strict=True)]

    def segment(self, tokens: Tokens) -> Segment | None:
        """What a row is; None if its marks are not those of one episode."""
        if tokens not in self._read:
            self._read[tokens] = self._parsed(tokens)
        return self._read[tokens]

    def samples_in(self, rows: Counter[Tokens]) -> Assembled:
        """The samples that some rows are, each row as often as it is there."""
        found, left = Assembled(), Counter[Tokens]()
        follows: dict[Mark, list[Tokens]] = {}
        for tokens, times in rows.items():
            if (segment := self.segment(tokens)) is None:
                found.whole[None] += times
                continue
            left[tokens] += times
            if not self._is_first(segment):
                follows.setdefault(segment.begins, []).append(tokens)
        used = set[Tokens]()
        for first in [tokens for tokens in left if self._is_first(self._known(tokens))]:
            while left[first] and (chain := self._whole(first, follows, left)) is not None:
                left.subtract(chain)
                used.update(chain)
                found.whole[self.row_of(first)] += 1
                found.turns.append([turn for tokens in chain for turn in self._known(tokens).turns])
        for tokens, times in (+left).items():
            (found.again if tokens in used else found.partial)[self.row_of(tokens)] += times
        return found

    def masked_samples(self, rows: Counter[Tokens]) -> tuple[Counter[int | None], Counter[int | None]]:
        """How many samples of each row of the data some masked rows are, and how many of those had no reason to be:
        their environment does not mask what is late."""
        found, wrong = Counter[int | None](), Counter[int | None]()
        for tokens, times in rows.items():
            segment = self.segment(tokens)
            if segment is None:
                found[None] += times
            elif self._is_first(segment):
                found[segment.begins.row] += times
                if segment.begins.row not in self.may_be_late:
                    wrong[segment.begins.row] += times
        return found, wrong

    def _whole(self, first: Tokens, follows: Mapping[Mark, Sequence[Tokens]], left: Counter[Tokens]
               ) -> list[Tokens] | None:
        """The segments of a sample from its first one on; None if one is missing."""
        segment = self._known(first)
        answered = next(((place, *self._answers[place]) for place in segment.ends if place in self._answers), None)
        if answered is None:
            return [first]
        place, done, role = answered
        if done:
            return [first]
        if role != USER:  # the next turn should be in the same segment
            return None
        left = left - Counter([first])
        # Of several segments that begin there, one of which a whole sample can be made.
        rests = (self._whole(tokens, follows, left) for tokens in follows.get(place, ()) if left[tokens])
        rest = next((each for each in rests if each is not None), None)
        return None if rest is None else [first, *rest]

    def _is_first(self, segment: Segment) -> bool:
        """Of a sample: the only one, where answers have the role "tool"."""
        return segment.begins.turn == 0

    def _known(self, tokens: Tokens) -> Segment:
        segment = self.segment(tokens)
        assert segment is not None
        return segment

    def _parsed(self, tokens: Tokens) -> Segment | None:
        text = self._decoded(tokens)
        marks = marks_in(text)
        if not marks:
            return None
        (first, _), (last, end) = marks[0], marks[-1]
        one_episode = all((mark.row, mark.seed, mark.turn) == (first.row, first.seed, turn)
                          for turn, (mark, _) in enumerate(marks))
        if not one_episode or not 0 <= first.row < len(self._rows_of_data):
            return None
        opened = max((number for number, (mark, _) in enumerate(marks) if self._begins_anew(mark)), default=0)
        last_turn = [each[end:].partition(TURN)[2] for each in (text, self._decoded(tokens[:-1]))]
        turns = [(mark, frozenset([legible(_turn_before(text[since : text.rindex(str(following))]))]))
                 for (mark, since), (following, _) in pairwise(marks[opened:])]
        turns.append((last, frozenset(map(legible, last_turn))))
        return Segment(marks[opened][0], tuple(map(last.after, last_turn)), tuple(turns))

    def _begins_anew(self, mark: Mark) -> bool:
        """Whether the answer that led there begins a segment."""
        return mark.turn > 0 and self._answers.get(mark, (False, USER))[1] == USER

    def _decoded(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _opening(self) -> Tokens:
        return tuple(self._tokenizer(TURN, add_special_tokens=False)["input_ids"])


def _turn_before(text: str) -> str:
    """What the policy wrote, in what stands between two marks of a segment."""
    return text.partition(TURN)[2].rpartition(RESULT)[0].removesuffix(END)


def as_segments(order: DataOrder, samples: Iterable[Tokens]) -> Iterator[Tokens]:
    """The rows of samples whose tokens follow one another."""
    for sample in samples:
        yield from order.segments_of(sample) if isinstance(order, EpisodeOrder) else (sample,)
