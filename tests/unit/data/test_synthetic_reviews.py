import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_ray.data.synthetic_reviews import ReviewFiles, make_openings, make_reviews, write_review, write_reviews
from rlhf_ray.errors import DataError
from rlhf_ray.rewards.sentiment import judge_scores


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts_of(path: Path) -> list[str]:
    return [row["prompt"] for row in read_lines(path)]


def test_files_have_the_counts_asked_for(review_files: ReviewFiles):
    counts = {name: len(read_lines(getattr(review_files, name)))
              for name in ("sft", "prompts", "pair_prompts", "eval_prompts")}
    assert counts == {"sft": 40_000, "prompts": 8_000, "pair_prompts": 6_500, "eval_prompts": 1_024}


def test_sft_rows_carry_text_sentiment_and_domain(review_files: ReviewFiles):
    rows = read_lines(review_files.sft)
    assert all(row.keys() == {"text", "sentiment", "domain"} for row in rows)
    assert {row["sentiment"] for row in rows} == {"positive", "negative", "neutral"}
    assert len({row["domain"] for row in rows}) == 8


def test_prompts_are_distinct_within_and_across_files(review_files: ReviewFiles):
    everything = [p for path in (review_files.prompts, review_files.pair_prompts, review_files.eval_prompts)
                  for p in prompts_of(path)]
    assert len(set(everything)) == len(everything)


def test_no_review_opens_with_an_evaluation_prompt(review_files: ReviewFiles, review_texts: list[str]):
    held_out = tuple(prompts_of(review_files.eval_prompts))
    # Every opening ends in " and" or ".", so none is the beginning of a longer one: a match is the opening itself.
    assert not [text for text in review_texts if text.startswith(held_out)]


def test_the_same_seed_writes_the_same_bytes(review_files: ReviewFiles, tmp_path: Path):
    again = write_reviews(tmp_path / "again", seed=0)
    other = write_reviews(tmp_path / "other", seed=1)
    for name in ("sft", "prompts", "pair_prompts", "eval_prompts"):
        assert getattr(again, name).read_bytes() == getattr(review_files, name).read_bytes()
        assert getattr(other, name).read_bytes() != getattr(review_files, name).read_bytes()


def test_reviews_follow_the_seed():
    assert list(make_reviews(20, seed=1)) == list(make_reviews(20, seed=1)) != list(make_reviews(20, seed=2))


def test_sentences_begin_with_a_capital_and_have_no_open_slots(review_texts: list[str]):
    assert all(text[0].isupper() and text.endswith(".") for text in review_texts)
    assert not [text for text in review_texts if re.search(r"\. [a-z]|[^.] (The|It|We|Most) |[{}]|  ", text)]


def test_texts_hardly_repeat(review_texts: list[str]):
    assert len(set(review_texts)) >= 0.999 * len(review_texts)
    continuations = [r.continuation for r in make_reviews(20_000, seed=1)]
    assert len(set(continuations)) >= 0.999 * len(continuations)


def test_positive_responses_alone_hardly_repeat():
    # A policy that learned to write positive responses only must still have many to choose from.
    positive = [r.continuation for r in make_reviews(20_000, seed=2) if r.sentiment == "positive"]
    assert len(set(positive)) >= 0.999 * len(positive)


def test_every_prompt_may_go_on_with_any_sentiment():
    rng = random.Random(0)
    for opening in make_openings(20, seed=5):
        reviews = [write_review(rng, opening, "film") for _ in range(60)]
        assert {r.sentiment for r in reviews} == {"positive", "negative", "neutral"}


def test_the_judge_finds_openings_neutral_and_continuations_slightly_positive(review_files: ReviewFiles):
    reviews = list(make_reviews(6_000, seed=4))
    scores = judge_scores([r.continuation for r in reviews])
    assert 0.03 <= scores.mean() <= 0.15
    of = {s: scores[[r.sentiment == s for r in reviews]].mean() for s in ("positive", "negative", "neutral")}
    assert of["positive"] > 0.75 and of["negative"] < -0.6 and abs(of["neutral"]) < 0.1
    assert np.abs(judge_scores(prompts_of(review_files.eval_prompts))).max() < 0.1


def test_lengths_in_tokens_suit_short_responses(review_files: ReviewFiles, tokenizer):
    def lengths(texts: list[str]) -> np.ndarray:
        return np.array([len(ids) for ids in tokenizer(texts)["input_ids"]])

    prompts = lengths([p for path in (review_files.prompts, review_files.pair_prompts, review_files.eval_prompts)
                       for p in prompts_of(path)])
    assert prompts.min() >= 5 and prompts.max() <= 21 and 8 <= prompts.mean() <= 10
    responses = lengths([r.continuation for r in make_reviews(5_000, seed=6)]) + 1  # the end-of-sequence token
    assert 23 <= responses.mean() <= 26 and (responses <= 32).mean() > 0.95
    assert 32 <= (lengths([r.text for r in make_reviews(5_000, seed=6)]) + 1).mean() <= 45


def test_a_review_tokenises_as_its_opening_and_its_continuation(tokenizer):
    for review in make_reviews(500, seed=7):
        whole, opening, rest = tokenizer([review.text, review.opening, review.continuation])["input_ids"]
        assert whole == opening + rest


def test_more_prompts_than_the_grammar_has_is_an_error(monkeypatch: pytest.MonkeyPatch):
    from rlhf_ray.data import synthetic_reviews

    monkeypatch.setattr(synthetic_reviews, "_opening", lambda rng, domain: domain)
    with pytest.raises(DataError, match="only 8 different prompts, not 9"):
        make_openings(9, seed=0)
