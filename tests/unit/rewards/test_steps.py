"""Steps of a response in characters and in tokens, of tokenizers that cut words, characters and separators as they
like."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.data.tokenizer import train_tokenizer
from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.process_reward_model import placed, split_steps, steps_of
from rlhf_ray.rewards.protocol import RewardRequest

TEXTS = ["one step\nand one more\n\n1+2=3\n3+4=7\n", "caf\u00e9 \u2192 caf\u00e9\n\u2192\n", "one\n1+2=3\n"]


@pytest.fixture(scope="module", params=[258, 300], ids=["bytes", "merges"])
def tokenizer(request, tmp_path_factory):
    """Of single bytes, and one whose tokens reach over separators and hold parts of characters."""
    return train_tokenizer(TEXTS * 30, request.param, tmp_path_factory.mktemp("tokenizer"))


def request_of(tokenizer, response, gaps=(), end=True, prompt=(5, 6)):
    """A request whose response has these tokens that the policy did not write, by their number in the response."""
    ids = [*tokenizer(response)["input_ids"], *([tokenizer.eos_token_id] if end else [])]
    mask = np.array([False] * len(prompt) + [i not in gaps for i in range(len(ids))])
    return RewardRequest(SampleKey(0, 0, 0), "p", response, np.array([*prompt, *ids], np.int32), mask, "stop", {})


@pytest.mark.parametrize(("text", "steps"), [
    ("a\nb", [("a", 2), ("b", 3)]),
    ("a\n\nb\n", [("a", 3), ("b", 5)]),
    ("\na\n \nb", [("a", 5), ("b", 6)]),
    ("a", [("a", 1)]),
    ("", []),
    (" \n", []),
])
def test_steps_end_behind_their_separators(text, steps):
    assert split_steps(text, "\n") == steps


def test_a_separator_may_be_longer_than_a_character():
    assert split_steps("a\nb\n\nc", "\n\n") == [("a\nb", 5), ("c", 6)]


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=150)
@given(text=st.text(st.sampled_from("ab1+=\n \u00e9\u2192"), max_size=24), end=st.booleans())
def test_every_step_lands_on_the_token_that_completes_it(tokenizer, text, end):
    request = request_of(tokenizer, text, end=end)
    steps, ids = steps_of(request, "\n", tokenizer), request.tokens[2:].tolist()
    pieces = split_steps(text, "\n")
    assert steps.texts == [piece for piece, _ in pieces]
    for (_, upto), token in list(zip(pieces, steps.tokens - 2, strict=True))[:-1]:
        assert decoded(tokenizer, ids[: token + 1]).startswith(text[:upto])
        assert not decoded(tokenizer, ids[:token]).startswith(text[:upto])
    if pieces:
        assert steps.tokens[-1] == len(request.tokens) - 1, "the last step ends with the response"


@settings(deadline=None, max_examples=80)
@given(text=st.text(st.sampled_from("ab1\n\u2192"), min_size=1, max_size=20), seed=st.integers(0, 2**16))
def test_sums_are_kept_and_nothing_falls_on_foreign_tokens(tokenizer, text, seed):
    rng = np.random.default_rng(seed)
    gaps = set(rng.choice(np.arange(1, len(text) + 1), rng.integers(0, len(text) + 1), replace=False).tolist())
    request = request_of(tokenizer, text, gaps)
    steps = steps_of(request, "\n", tokenizer)
    values = rng.random(len(steps.texts))
    row = placed(values, steps.tokens, len(request.tokens))
    assert row.dtype == np.float32 and row.sum() == pytest.approx(values.sum(), rel=1e-6)
    assert not row[~request.response_mask].any()


def test_a_step_that_ends_in_a_gap_counts_for_the_token_before(tokenizer):
    plain = request_of(tokenizer, "1+2\n3\n4")
    ends = steps_of(plain, "\n", tokenizer).tokens
    gap = range(ends[0] - 2, ends[1] - 1)  # all of the second step and the first's last token
    assert steps_of(request_of(tokenizer, "1+2\n3\n4", gap), "\n", tokenizer).tokens.tolist() == [
        ends[0] - 1, ends[0] - 1, ends[2]]


def test_a_response_of_no_tokens_has_no_steps_and_its_prompt_none_either(tokenizer):
    request = request_of(tokenizer, "", end=False, prompt=tokenizer("1+2=3\n").input_ids)
    steps = steps_of(request, "\n", tokenizer)
    assert steps.texts == [] and steps.tokens.tolist() == []


def test_values_of_one_token_add_up():
    assert placed(np.array([0.5, 0.25, 1.0]), np.array([1, 1, 3]), 5).tolist() == [0, 0.75, 0, 1, 0]
