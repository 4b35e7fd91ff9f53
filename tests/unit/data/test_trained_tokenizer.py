from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.data.tokenizer import ADDED_PAD, EOS, PAD, check_vocabulary, tokenizer_digest, train_tokenizer
from rlhf_ray.errors import ConfigError, ModelError


def test_the_vocabulary_has_the_size_asked_for_and_two_special_tokens(tokenizer):
    assert len(tokenizer) == 1024
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (PAD, 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (EOS, 1)
    assert tokenizer.bos_token_id is None
    assert tokenizer("We saw the film.")["input_ids"][0] not in (0, 1)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_decodes_to_itself(tokenizer, text: str):
    text = text.replace(PAD, "").replace(EOS, "")
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not {0, 1} & set(ids)


def test_training_twice_gives_the_same_tokenizer(tokenizer, review_texts: list[str], tmp_path: Path):
    again = train_tokenizer(review_texts, 1024, tmp_path)
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)
    assert again(review_texts[:50])["input_ids"] == tokenizer(review_texts[:50])["input_ids"]


def test_a_vocabulary_below_all_bytes_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"vocab_size=257 .* at least 258"):
        train_tokenizer(["a"], 257, tmp_path)
    assert len(train_tokenizer(["a"], 258, tmp_path)) == 258


def test_the_digest_tells_vocabularies_and_special_tokens_apart(tokenizer, tokenizer_directory: Path, tmp_path: Path):
    from transformers import AutoTokenizer

    digest = tokenizer_digest(tokenizer)
    smaller = train_tokenizer(["another text altogether"], 300, tmp_path)
    other_end: Any = AutoTokenizer.from_pretrained(tokenizer_directory, eos_token=PAD)
    assert len({digest, tokenizer_digest(smaller), tokenizer_digest(other_end)}) == 3
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tokenizer_directory)) == digest


def test_padding_is_not_part_of_what_ids_mean(tokenizer, tokenizer_directory: Path):
    from transformers import AutoTokenizer

    other: Any = AutoTokenizer.from_pretrained(tokenizer_directory, pad_token=EOS)
    none: Any = AutoTokenizer.from_pretrained(tokenizer_directory, pad_token=None)
    added: Any = AutoTokenizer.from_pretrained(tokenizer_directory)
    assert added.add_special_tokens({"pad_token": ADDED_PAD}) == 1
    assert {tokenizer_digest(made) for made in (other, none, added)} == {tokenizer_digest(tokenizer)}
    added.add_tokens(["another"])
    assert tokenizer_digest(added) != tokenizer_digest(tokenizer)


def test_a_model_must_know_every_id_and_may_know_more(tokenizer):
    check_vocabulary(tokenizer, 1024, "policy")
    check_vocabulary(tokenizer, 1088, "policy")
    with pytest.raises(ModelError, match=r"id 1023 .* model reward has only 1023 embeddings, ids 0 to 1022"):
        check_vocabulary(tokenizer, 1023, "reward")
