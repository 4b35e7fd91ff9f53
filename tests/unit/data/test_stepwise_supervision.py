"""Labelled steps as a process reward model reads them: placeholders, labels, what is left out and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf_ray.config.data import ProcessRowsConfig, StepsConfig
from rlhf_ray.data.held_out import split_held_out
from rlhf_ray.data.stepwise_supervision import IGNORE, load_process_rows
from rlhf_ray.errors import ConfigError, DataError, ModelError

STEPS = StepsConfig(placeholder="?", separator=" ")


def load(tokenizer: Any, path: str, steps: StepsConfig = STEPS, **fields: Any):
    config = ProcessRowsConfig(path=path, **{"held_out": 0.0, **fields})
    [train], [held], [report] = split_held_out([load_process_rows(config, steps, tokenizer)], config)
    return train, held, report


def row(*steps: str, labels: Any, prompt: str = "1+2=") -> dict[str, Any]:
    return {"prompt": prompt, "steps": list(steps), "labels": labels}


def token(tokenizer: Any, text: str) -> int:
    (found,) = tokenizer(text)["input_ids"]
    return found


def at_placeholders(rows: Any, i: int = 0) -> list[float]:
    return rows.row(i, "labels")[rows.row(i, "placeholders")].tolist()


def test_a_row_is_prompt_and_steps_with_placeholders_and_separators_between(write_jsonl, tokenizer):
    train, held, report = load(tokenizer, write_jsonl(row("1+2=3", "so3", labels=[1, 0])))
    assert (len(train), len(held), report.kept) == (1, 0, 1)
    parts = [tokenizer(text)["input_ids"] for text in ("1+2=", "1+2=3", "?", " ", "so3", "?")]
    assert train.tokens.tolist() == [i for part in parts for i in part]
    assert np.flatnonzero(train.placeholders).tolist() == [sum(map(len, parts[:2])), len(train.tokens) - 1]


@pytest.mark.parametrize("labels", [[True, False, None], [1, 0, None], [1.0, 0.0, None], ["+", "-", None]])
def test_hard_labels_are_token_ids_however_they_are_spelt(write_jsonl, tokenizer, labels):
    train, _, _ = load(tokenizer, write_jsonl(row("a", "b", "c", labels=labels)))
    assert train.labels.dtype == np.int64
    assert at_placeholders(train) == [token(tokenizer, "+"), token(tokenizer, "-"), IGNORE]
    assert (train.labels[~train.placeholders] == IGNORE).all()


def test_further_labels_are_tokens_too(write_jsonl, tokenizer):
    steps = STEPS.model_copy(update={"others": {"=": 1.0, "3": 0.25}})
    train, _, _ = load(tokenizer, write_jsonl(row(*"abcdef", labels=["=", "+", "3", 0, True, None])), steps)
    ids = [token(tokenizer, text) for text in ("=", "+", "3", "-", "+")]
    assert train.labels.dtype == np.int64 and at_placeholders(train) == [*ids, IGNORE]
    for label, said in ((0.5, "0.5, a probability of a good step over a bad one, but there are steps.others"),
                        ("4", "'4'; a label is true, false, a number from 0 to 1, '\\+', '-', '=', '3' or null")):
        with pytest.raises(DataError, match=said):
            load(tokenizer, write_jsonl(row("a", labels=[label])), steps)
    with pytest.raises(ModelError, match=r"steps\.others='two words' is not a single token"):
        load(tokenizer, write_jsonl(row("a", labels=[1])), STEPS.model_copy(update={"others": {"two words": 1.0}}))


@pytest.mark.parametrize(("others", "said"), [
    ({"+": 1.0}, r"others has '\+', which is empty or one of"),
    ({"=": 1.5}, "others gives '=' the value 1.5; give a number from 0 to 1"),
])
def test_further_labels_differ_and_have_values_from_0_to_1(others, said):
    with pytest.raises(ConfigError, match=said):
        StepsConfig(placeholder="?", others=others)


def test_one_probability_makes_all_labels_of_the_data_soft(write_jsonl, tokenizer):
    rows = [row("a", "b", labels=[1, 0]), row("a", "b", "c", labels=["+", 0.25, None])]
    train, _, _ = load(tokenizer, write_jsonl(*rows))
    assert train.labels.dtype == np.float32
    assert [at_placeholders(train, i) for i in range(2)] == [[1, 0], [1, 0.25, IGNORE]]


def test_separators_at_the_ends_of_steps_are_not_doubled(write_jsonl, tokenizer):
    one, _, _ = load(tokenizer, write_jsonl(row("1+2=3 ", " so", labels=[1, 0])))
    other, _, _ = load(tokenizer, write_jsonl(row("1+2=3", "so", labels=[1, 0])))
    assert one.tokens.tolist() == other.tokens.tolist()


def test_what_cannot_be_used_is_left_out_and_named(write_jsonl, tokenizer):
    rows = [row("a", labels=[1]), row("b", "c", labels=[None, None]), row("a b", labels=[1]),
            row("abcd" * 50, labels=[1])]
    train, _, report = load(tokenizer, write_jsonl(*rows), max_tokens=20)
    assert len(train) == 1
    said = str(report)
    for reason in ("no step has a label (line 2)", "a step contains the separator ' ' (line 3)",
                   "longer than max_tokens=20 (line 4)"):
        assert f"1 left out: {reason}" in said


@pytest.mark.parametrize(("bad", "said"), [
    ({"prompt": "p", "steps": ["a"]}, "no column 'labels'; the row has .*'prompt', 'steps'"),
    (row("a", "b", labels=[1]), "1 labels in column 'labels' for 2 steps"),
    (row("a", labels=[2]), r"labels\[0\] is 2; a label is true, false, a number from 0 to 1, '\+', '-' or null"),
    (row("a", labels=[-1]), r"labels\[0\] is -1"),
    (row("a", labels=["good"]), r"labels\[0\] is 'good'"),
    (row("a", labels="+"), "column 'labels' must be a list of labels, not str; CSV files hold no lists"),
    (row(labels=[]), "column 'steps' is an empty list"),
    (row("a", " ", labels=[1, 0]), r"column 'steps\[1\]' is empty"),
    ({"prompt": "p", "steps": [7], "labels": [1]}, r"column 'steps\[0\]' must be a text, not int"),
])
def test_bad_rows_are_named_by_line(write_jsonl, tokenizer, bad, said):
    with pytest.raises(DataError, match=f"line 2: {said}"):
        load(tokenizer, write_jsonl(row("a", labels=[1]), bad))


def test_rows_of_one_prompt_are_held_out_together(write_jsonl, tokenizer):
    rows = [row(f"step {i}".replace(" ", "_"), labels=[i % 2], prompt=f"{i % 20}+1=") for i in range(100)]
    train, held, _ = load(tokenizer, write_jsonl(*rows), held_out=0.2)
    length = len(tokenizer("9+1=")["input_ids"])
    prompts = [{tuple(part.row(i, "tokens")[:length]) for i in range(len(part))} for part in (train, held)]
    assert (len(train), len(held)) == (80, 20) and not prompts[0] & prompts[1]


@pytest.mark.parametrize(("changes", "said"), [
    ({"placeholder": "what now"}, r"steps\.placeholder='what now' is not a single token of .*choose a text that"),
    ({"good": "perfectly right"}, r"steps\.good='perfectly right' is not a single token"),
    ({"bad": "utterly wrong"}, r"steps\.bad='utterly wrong' is not a single token"),
])
def test_the_three_tokens_must_be_single(write_jsonl, tokenizer, changes, said):
    steps = StepsConfig(**{**STEPS.model_dump(), **changes})
    with pytest.raises(ModelError, match=said):
        load(tokenizer, write_jsonl(row("a", labels=[1])), steps)
