from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.config.data import PreferencesConfig
from rlhf_ray.data.held_out import group_digest, held_out_digests, split_held_out
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.supervised_records import Pairs
from rlhf_ray.errors import DataError
from tests.unit.data.left_out import left_out

END = 1


def load(tokenizer: Any, path: str, **fields: Any):
    config = PreferencesConfig(path=path, **{"held_out": 0.0, **fields})
    [train], [held], [report] = split_held_out([load_preferences(config, tokenizer)], config)
    return train, held, report


def held_out_rows(groups: list[str], share: float) -> np.ndarray:
    return held_out_digests(np.array([group_digest(group) for group in groups], dtype=np.uint64), share)


def pair(prompt: str, chosen: str, rejected: str, **flags: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **flags}


def test_sides_hold_prompt_response_and_end_with_loss_on_the_response(write_jsonl, tokenizer):
    train, held, report = load(tokenizer, write_jsonl(pair("We saw", " the film.", " it")))
    assert (len(train), len(held), report.kept) == (1, 0, 1)
    for side, response in ((train.chosen, " the film."), (train.rejected, " it")):
        assert side.tokens[~side.loss_mask].tolist() == tokenizer("We saw")["input_ids"]
        assert side.tokens[side.loss_mask].tolist() == [*tokenizer(response)["input_ids"], END]


def test_a_response_that_was_cut_gets_no_end(write_jsonl, tokenizer):
    rows = [pair("We", " saw", " read", chosen_finished=False), pair("I", " saw", " read", rejected_finished=False)]
    train, _, _ = load(tokenizer, write_jsonl(*rows))
    ends = [[side.row(i, "tokens")[-1] == END for side in (train.chosen, train.rejected)] for i in range(2)]
    assert ends == [[False, True], [True, False]]


def test_an_empty_prompt_is_allowed(write_jsonl, tokenizer):
    train, _, _ = load(tokenizer, write_jsonl(pair("", "We saw", "I read")))
    assert train.chosen.loss_mask.all()


def test_equal_sides_are_left_out_counted_and_named(write_jsonl, tokenizer):
    rows = [pair("We", " saw", " saw"), pair("We", " saw", " read"), pair("We", " saw", " saw", chosen_finished=False)]
    train, _, report = load(tokenizer, write_jsonl(*rows))
    assert report.left_out == {"chosen and rejected are the same": left_out(report, 1)}
    assert len(train) == 2


def test_pairs_with_one_longer_side_are_left_out_whole(write_jsonl, tokenizer):
    rows = [pair("We", " saw", " read"), pair("We", " saw", " saw the film"), pair("We", " saw the film", " saw")]
    train, _, report = load(tokenizer, write_jsonl(*rows), max_tokens=3)
    assert (len(train), report.left_out) == (1, {"a side is longer than max_tokens=3": left_out(report, 2, 3)})


def test_an_empty_response_needs_a_row_that_says_how_it_ended(write_jsonl, tokenizer):
    with pytest.raises(DataError, match="line 1: column 'rejected' is empty"):
        load(tokenizer, write_jsonl(pair("We", " saw", "")))
    rows = [pair("We", " saw", "", rejected_finished=True), pair("We", " saw", "", rejected_finished=False)]
    train, _, report = load(tokenizer, write_jsonl(*rows))
    assert train.rejected.tokens.tolist() == [*tokenizer("We")["input_ids"], END]
    assert report.left_out == {"a side is neither a text nor finished": left_out(report, 2)}


def test_bad_rows_are_named_by_line(write_jsonl, tokenizer):
    good = pair("We", " saw", " read")
    with pytest.raises(DataError, match="line 2: no column 'rejected'"):
        load(tokenizer, write_jsonl(good, {"prompt": "We", "chosen": "x"}))
    with pytest.raises(DataError, match="line 2: column 'chosen_finished' must be true or false, not 'perhaps'"):
        load(tokenizer, write_jsonl(good, pair("We", "a", "b", chosen_finished="perhaps")))


def test_margins_stay_with_their_pairs(write_jsonl, tokenizer):
    rows = [pair("We", " saw", " read", margin=0.5), pair("We", " saw", " saw", margin=1), pair("I", " ran", " sat",
                                                                                                margin="2.5")]
    train, _, _ = load(tokenizer, write_jsonl(*rows), margin="margin")
    assert train.margins.dtype == np.float32 and train.margins.tolist() == [0.5, 2.5]
    assert train.select([1, 0]).margins.tolist() == [2.5, 0.5]
    assert load(tokenizer, write_jsonl(*rows))[0].margins is None, "a margin is used where it is asked for"


@pytest.mark.parametrize(("value", "said"), [
    (None, "line 2: no column 'margin'; the row has .*'prompt'"), ("much", "line 2: column 'margin' must be a finite"),
    (True, "not True"), (float("inf"), "finite"), (-0.25, r"line 2: column 'margin' is -0.25; .*exchange chosen and"),
])
def test_a_margin_that_is_none_is_named(write_jsonl, tokenizer, value, said):
    rows = [pair("We", " saw", " read", margin=1), pair("I", " ran", " sat", **({} if value is None else
                                                                                  {"margin": value}))]
    with pytest.raises(DataError, match=said):
        load(tokenizer, write_jsonl(*rows), margin="margin")


def test_held_out_pairs_share_no_prompt_with_training_pairs(write_jsonl, tokenizer):
    rows = [pair(f"We saw {i % 40}", f" chosen {i}", f" rejected {i}") for i in range(200)]
    train, held, _ = load(tokenizer, write_jsonl(*rows), held_out=0.2)

    def prompts(pairs: Pairs) -> set[str]:
        sides = (pairs.chosen.select([i]) for i in range(len(pairs)))
        return {tokenizer.decode(side.tokens[~side.loss_mask]) for side in sides}

    assert (len(train), len(held)) == (160, 40)
    assert len(prompts(held)) == 8 and not prompts(train) & prompts(held)


def test_without_prompts_pairs_of_one_chosen_text_stay_together(write_jsonl, tokenizer):
    rows = [pair("", f"chosen {i // 2}", f"rejected {i}") for i in range(20)]
    train, held, _ = load(tokenizer, write_jsonl(*rows), held_out=0.2)
    texts = [{tokenizer.decode(p.chosen.row(i, "tokens")) for i in range(len(p))} for p in (train, held)]
    assert len(held) == 4 and not texts[0] & texts[1]


@given(groups=st.lists(st.integers(0, 12).map(str), min_size=2, max_size=80), share=st.floats(0.01, 0.9))
def test_whole_groups_are_held_out_near_the_share_whatever_the_order(groups: list[str], share: float):
    if len(set(groups)) == 1:
        with pytest.raises(DataError, match="all share one prompt"):
            held_out_rows(groups, share)
        return
    held = held_out_rows(groups, share)
    chosen = {g for g, h in zip(groups, held, strict=True) if h}
    assert not chosen & {g for g, h in zip(groups, held, strict=True) if not h}
    smallest = min(groups.count(g) for g in set(groups))
    assert 0 < held.sum() < len(groups)
    assert held.sum() <= max(1, round(share * len(groups)), smallest)
    backwards = held_out_rows(groups[::-1], share)
    assert np.array_equal(backwards[::-1], held)


def test_nothing_is_held_out_at_share_zero():
    assert not held_out_rows(["a", "a"], 0.0).any()
