"""The quickstart's data: synthetic reviews of films, hotels, gadgets, ... with a latent sentiment.

A review is a neutral opening (which serves as a prompt) and a continuation of two clauses and a closing remark. The
opening is independent of the sentiment, so each prompt may continue positively or negatively; the judge's mean over
continuations is a little above zero, so a policy can improve. The seed determines all files.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rlhf_ray.data import review_phrases as phrases
from rlhf_ray.errors import DataError
from rlhf_ray.files.writing import json_lines

SENTIMENT_WEIGHTS = {"positive": 0.38, "negative": 0.34, "neutral": 0.28}
"""How often each sentiment is drawn; the judge's mean over continuations is about +0.08."""
CLAUSE_FAITHFULNESS = 0.85
"""Share of clauses with the review's sentiment; the others draw their own."""


class Review(NamedTuple):
    """A synthetic review: `text` is `opening + continuation`."""

    opening: str
    continuation: str
    sentiment: str
    domain: str

    @property
    def text(self) -> str:
        """The whole review."""
        return self.opening + self.continuation


@dataclass(frozen=True)
class ReviewFiles:
    """The four files of the quickstart's data."""

    sft: Path
    """{"text", "sentiment", "domain"} a line."""
    prompts: Path
    """{"prompt"} a line, for PPO."""
    pair_prompts: Path
    """{"prompt"} a line, for the pairs that train the reward model."""
    eval_prompts: Path
    """{"prompt"} a line; no text of the other files starts with one of them."""


class _Draw(Mapping[str, str]):
    """Fills the slots of a phrase: looking up a table draws one of its phrases and fills its slots too."""

    def __init__(self, rng: random.Random, tables: Mapping[str, tuple[str, ...]]):
        self._random, self._tables = rng.random, tables

    def __getitem__(self, table: str) -> str:
        options = self._tables[table]
        phrase = options[int(self._random() * len(options))]
        return phrase.format_map(self) if "{" in phrase else phrase

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


@cache
def _opening_tables(domain: str) -> dict[str, tuple[str, ...]]:
    d = phrases.DOMAINS[domain]
    own = {"opening": phrases.OPENINGS, "act": d.acts, "thing": d.things, "trait": d.traits}
    return {**phrases.OPENING_TABLES, **own}


@cache
def _clause_tables(aspect: phrases.Aspect, sentiment: str) -> dict[str, tuple[str, ...]]:
    adjectives = phrases.GENERAL_ADJECTIVES[sentiment] + phrases.KIND_ADJECTIVES[aspect.kind][sentiment]
    own = {"clause": phrases.CLAUSES[sentiment], "closer": phrases.CLOSERS[sentiment], "adj": adjectives,
           "good": phrases.GENERAL_ADJECTIVES[sentiment], "aspect": (aspect.noun,), "was": (aspect.was,)}
    return {**phrases.SLOTS, **own}


def _draw_sentiment(rng: random.Random) -> str:
    return rng.choices(tuple(SENTIMENT_WEIGHTS), tuple(SENTIMENT_WEIGHTS.values()))[0]


def _opening(rng: random.Random, domain: str) -> str:
    return _Draw(rng, _opening_tables(domain))["opening"]


def _sentence_case(clause: str, after: str) -> str:
    """The clause with a capital letter if it begins a sentence."""
    return clause[0].upper() + clause[1:] if after.endswith(".") else clause


def _continuation(rng: random.Random, opening: str, domain: str, sentiment: str) -> str:
    """Two clauses and a remark, most of them of `sentiment`; begins with a space, so that it is tokenized apart."""
    aspects = rng.sample(phrases.DOMAINS[domain].aspects, 3)
    moods = [sentiment if rng.random() < CLAUSE_FAITHFULNESS else _draw_sentiment(rng) for _ in aspects]
    parts = [_Draw(rng, _clause_tables(aspect, mood))[kind]
             for aspect, mood, kind in zip(aspects, moods, ("clause", "clause", "closer"), strict=True)]
    opposed = {moods[0], moods[1]} == {"positive", "negative"}
    link = rng.choice(phrases.BUT if opposed else phrases.AND)
    first, second = _sentence_case(parts[0], opening), _sentence_case(parts[1], link)
    closer = _sentence_case(parts[2], ".")
    return f" {first}{link} {second}. {closer}."


def write_review(rng: random.Random, opening: str, domain: str) -> Review:
    """A review that continues `opening`, with a random sentiment."""
    sentiment = _draw_sentiment(rng)
    return Review(opening, _continuation(rng, opening, domain, sentiment), sentiment, domain)


def make_reviews(count: int, seed: int, avoid: frozenset[str] = frozenset()) -> Iterator[Review]:
    """`count` reviews whose openings are not in `avoid`."""
    rng = random.Random(f"reviews/{seed}")
    domains = tuple(phrases.DOMAINS)
    made = 0
    while made < count:
        domain = rng.choice(domains)
        opening = _opening(rng, domain)
        if opening not in avoid:
            made += 1
            yield write_review(rng, opening, domain)


def make_openings(count: int, seed: int) -> list[str]:
    """`count` different openings in random order.

    Raises:
        DataError: the grammar has fewer.
    """
    rng = random.Random(f"openings/{seed}")
    domains, openings, idle = tuple(phrases.DOMAINS), dict[str, None](), 0
    while len(openings) < count:
        before = len(openings)
        openings[_opening(rng, rng.choice(domains))] = None
        idle = idle + 1 if len(openings) == before else 0
        if idle > 10_000:
            raise DataError(f"the review grammar gave only {before} different prompts, not {count}; ask for fewer")
    return list(openings)


def write_reviews(directory: Path, seed: int, *, sft: int = 40_000, prompts: int = 8_000, pair_prompts: int = 6_500,
                  eval_prompts: int = 1_024) -> ReviewFiles:
    """Write the quickstart's data into `directory` (created if missing); counts are lines per file.

    No prompt is in two of the prompt files, and no review starts with an evaluation prompt.

    Raises:
        DataError: the files need more prompts than the grammar has.
    """
    directory.mkdir(parents=True, exist_ok=True)
    openings = make_openings(eval_prompts + prompts + pair_prompts, seed)
    held_out = frozenset(openings[:eval_prompts])
    files = ReviewFiles(*(directory / f"{name}.jsonl" for name in ("sft", "prompts", "pair_prompts", "eval_prompts")))
    files.eval_prompts.write_bytes(json_lines({"prompt": p} for p in openings[:eval_prompts]))
    files.prompts.write_bytes(json_lines({"prompt": p} for p in openings[eval_prompts : eval_prompts + prompts]))
    files.pair_prompts.write_bytes(json_lines({"prompt": p} for p in openings[eval_prompts + prompts :]))
    files.sft.write_bytes(json_lines({"text": r.text, "sentiment": r.sentiment, "domain": r.domain}
                                     for r in make_reviews(sft, seed, avoid=held_out)))
    return files
