"""Pretraining text: every token of every text, in rows of bounded length."""

import numpy as np
import pytest

from rlhf_ray.config.algorithm import PtxConfig
from rlhf_ray.data.demonstrations import cut_rows, load_pretraining_text
from rlhf_ray.data.supervised_records import Sequences
from rlhf_ray.errors import DataError
from rlhf_ray.records import offsets_of


def sequences(lengths):
    tokens = np.arange(sum(lengths), dtype=np.int32)
    return Sequences(offsets_of(lengths), tokens, tokens % 3 > 0)


def rows_of(s):
    return [s.row(i, "tokens").tolist() for i in range(len(s))]


def test_rows_are_cut_where_they_are_too_long():
    cut = cut_rows(sequences([5, 2, 6]), 3)
    assert rows_of(cut) == [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9], [10, 11, 12]]
    assert (cut.loss_mask == (cut.tokens % 3 > 0)).all()


def test_a_single_token_that_remains_is_dropped():
    assert rows_of(cut_rows(sequences([4, 1, 2]), 3)) == [[0, 1, 2], [5, 6]]


def test_short_rows_stay_as_they_are():
    whole = sequences([3, 2])
    assert rows_of(cut_rows(whole, 3)) == rows_of(whole)


def test_texts_end_and_are_all_used(write_jsonl, tokenizer):
    path = write_jsonl({"body": "We saw the film."}, {"body": "I read"})
    rows, report = load_pretraining_text(PtxConfig(path=path, column="body", max_tokens=4), tokenizer)
    texts = tokenizer.decode(rows.tokens)
    assert texts == "We saw the film.<|eos|>I read<|eos|>"
    assert rows.lengths.max() == 4 and rows.loss_mask.all()
    assert "2 of 2 rows used" in str(report)


def test_the_column_is_the_configured_one(write_jsonl, tokenizer):
    with pytest.raises(DataError, match="no column 'text'"):
        load_pretraining_text(PtxConfig(path=write_jsonl({"body": "I read"})), tokenizer)
