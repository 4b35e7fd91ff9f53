from typing import Any

import numpy as np
import pytest

from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.data import demonstrations
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.synthetic_reviews import ReviewFiles
from rlhf_ray.errors import DataError, ModelError
from tests.unit.data.left_out import left_out

END = 1


def test_plain_texts_carry_loss_everywhere_and_end(write_jsonl, tokenizer):
    path = write_jsonl({"text": "We saw the film."}, {"text": "I read"})
    sequences, report = load_demonstrations(DemonstrationsConfig(path=path), tokenizer)
    assert sequences.row(0, "tokens").tolist() == [*tokenizer("We saw the film.")["input_ids"], END]
    assert sequences.row(1, "tokens").tolist() == [*tokenizer("I read")["input_ids"], END]
    assert sequences.loss_mask.all() and sequences.loss_mask.dtype == bool and sequences.tokens.dtype == np.int32
    assert (report.rows, report.kept) == (2, 2)


def test_prompt_tokens_carry_no_loss(write_jsonl, tokenizer):
    path = write_jsonl({"q": "We saw", "a": " the film."}, {"q": "I", "a": " read"})
    sequences, _ = load_demonstrations(DemonstrationsConfig(path=path, prompt="q", response="a"), tokenizer)
    for i, (prompt, response) in enumerate([("We saw", " the film."), ("I", " read")]):
        tokens, mask = sequences.row(i, "tokens"), sequences.row(i, "loss_mask")
        assert tokens[~mask].tolist() == tokenizer(prompt)["input_ids"]
        assert tokens[mask].tolist() == [*tokenizer(response)["input_ids"], END]
        assert not mask[0] and mask[-1]


def test_longer_rows_are_left_out_and_named_counting_the_end_token(write_jsonl, tokenizer):
    path = write_jsonl({"text": "We saw"}, {"text": "We saw the"})
    sequences, report = load_demonstrations(DemonstrationsConfig(path=path, max_tokens=3), tokenizer)
    assert tokenizer.decode(sequences.tokens) == "We saw<|eos|>"
    assert report.left_out == {"longer than max_tokens=3": left_out(report, 2)}
    with pytest.raises(DataError, match=r"no row is left.*shortest row has 3 tokens"):
        load_demonstrations(DemonstrationsConfig(path=path, max_tokens=2), tokenizer)


def test_bad_rows_are_named_by_line(write_jsonl, tokenizer):
    with pytest.raises(DataError, match="line 2: column 'text' must be a text, not float"):
        load_demonstrations(DemonstrationsConfig(path=write_jsonl({"text": "We"}, {"text": 0.5})), tokenizer)
    config = DemonstrationsConfig(path=write_jsonl({"prompt": "We", "answer": "x"}), prompt="prompt")
    with pytest.raises(DataError, match=r"line 1: no column 'response'; the row has \['answer', 'prompt'\]"):
        load_demonstrations(config, tokenizer)


def test_a_tokenizer_without_an_end_is_refused(write_jsonl, tokenizer_directory):
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_directory)
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        load_demonstrations(DemonstrationsConfig(path=write_jsonl({"text": "We"})), tokenizer)


def test_reviews_are_tokenized_many_at_a_time(review_files: ReviewFiles, tokenizer, write_jsonl, monkeypatch):
    """Row by row, the 40,000 of the quickstart take minutes."""
    batches, encode = [], demonstrations.encode_pieces
    monkeypatch.setattr(demonstrations, "encode_pieces", lambda t, rows: batches.append(rows) or encode(t, rows))
    lines = review_files.sft.read_text().splitlines()[:5_000]
    sequences, _ = load_demonstrations(DemonstrationsConfig(path=write_jsonl(*lines)), tokenizer)
    assert len(sequences) == sum(map(len, batches)) == 5_000 and len(batches) < 50
    assert (sequences.tokens[sequences.offsets[1:] - 1] == END).all()
