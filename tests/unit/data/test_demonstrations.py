from typing import Any

import numpy as np
import pytest

from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.data import demonstrations
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.found_columns import with_found_columns
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


TALK = [{"role": "user", "content": "We saw"}, {"role": "assistant", "content": "it"}]
TEXT, PAIR = {"text": "x"}, {"prompt": "We saw", "response": " it"}


@pytest.mark.parametrize(("row", "given", "found"), [
    (TEXT, {}, {"text": "text"}), (PAIR, {}, {"prompt": "prompt", "response": "response"}),
    ({"prompt": "We saw", "completion": " it"}, {}, {"prompt": "prompt", "response": "completion"}),
    ({"messages": TALK}, {}, {"messages": "messages"}), ({"conversations": TALK}, {}, {"messages": "conversations"}),
    ({"messages": TALK, "prompt": "a title", **TEXT}, {}, {"messages": "messages"}),
    ({"messages": TALK, **PAIR, "completion": "y"}, {}, {"prompt": "prompt", "response": "completion"}),
    ({"q": "We saw", "completion": " it", **TEXT}, {"prompt": "q"}, {"prompt": "q", "response": "completion"}),
    ({"prompt": "We saw", "a": " it", **TEXT}, {"response": "a"}, {"prompt": "prompt", "response": "a"}),
    ({"messages": TALK, **TEXT}, {"text": "text"}, {"text": "text"}),
])
def test_columns_that_nobody_names_are_found_in_a_stated_order(write_jsonl, row, given, found):
    config = DemonstrationsConfig(path=write_jsonl("{torn", row), **given)
    assert with_found_columns(config).named_columns == found


def test_each_data_set_of_a_mix_has_columns_of_its_own(write_jsonl):
    mix = [{"path": write_jsonl(PAIR, name="a.jsonl")}, {"path": write_jsonl({"messages": TALK}, name="b.jsonl")},
           {"path": "unread.jsonl", "text": "mine"}]
    parts = with_found_columns(DemonstrationsConfig(mix=mix)).parts()
    assert [part.named_columns for part in parts] == [
        {"prompt": "prompt", "response": "response"}, {"messages": "messages"}, {"text": "mine"}]


def test_the_report_says_which_columns_were_read_and_which_were_not(write_jsonl, tokenizer):
    path = write_jsonl({"text": "We", "prompt": "I", "completion": " read", "id": 7})
    _, report = load_demonstrations(DemonstrationsConfig(path=path), tokenizer)
    assert str(report).endswith("1 of 1 rows used, as prompts with responses (columns prompt and completion), not text")


@pytest.mark.parametrize(("row", "given", "said"), [
    ({"body": "x", "id": 1}, {}, r"line 1: no columns of demonstrations are found; the row has \['body', 'id'\]. Set "
     r"data.messages .*, data.prompt and data.response, or data.text"),
    ({"messages": TALK}, {"text": "body"}, r"no column 'body'; the row has \['messages'\]. .* leave data.text out "
     r"if it is conversations \(column messages\)"),
    (PAIR, {"prompt": "q", "response": "a"}, "no column 'q'; .* leave data.prompt and data.response out"),
    ({"conversations": [{"from": "human", "value": "x"}]}, {}, "role and content; rename ShareGPT's from and value"),
])
def test_columns_that_are_not_there_are_named_with_the_fix(write_jsonl, tokenizer, row, given, said):
    with pytest.raises(DataError, match=said):
        load_demonstrations(DemonstrationsConfig(path=write_jsonl(row), **given), tokenizer)


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
