"""Tokenizers: training one from texts, and checking whether two models use the same token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_ray.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS = "<|pad|>", "<|eos|>"
ADDED_PAD = "<|added_pad|>"
"""A token that an export of a reward model adds for padding alone; no text becomes it."""
SMALLEST_VOCABULARY = 256 + len((PAD, EOS))
"""All bytes and the special tokens: enough to encode any text."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path, *, across_words: bool = False,
                    min_frequency: int = 0) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` tokens and save it to `directory` in Hugging Face format.

    Ids 0 and 1 are the padding and the end-of-sequence token; there is no beginning-of-sequence token, and none is
    added. Encoding and decoding returns the same text.

    Args:
        across_words: a token may contain blanks, line breaks and several words, so that texts with long equal parts
            have few tokens.
        min_frequency: how often two tokens must follow each other in the texts to become one.

    Raises:
        ConfigError: `vocab_size` cannot hold all bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(f"vocab_size={vocab_size} cannot hold 256 bytes and 2 special tokens; use at least "
                          f"{SMALLEST_VOCABULARY}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not across_words)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=[PAD, EOS], initial_alphabet=alphabet,
        show_progress=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False)
    tokenizer.save_pretrained(directory)
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex digest of the vocabulary (token to id) and the ids of the special tokens.

    Equal digests mean that token ids have the same meaning for both models. The rules that split text into tokens are
    not part of it: the models exchange ids, not text. Nor is padding, which no row contains.
    """
    specials = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk")}
    vocabulary = sorted((token, number) for token, number in tokenizer.get_vocab().items() if token != ADDED_PAD)
    content = json.dumps([vocabulary, specials], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, model: str) -> None:
    """Check that `model`, with `vocab_size` embeddings, knows every id of the tokenizer (more embeddings are fine).

    Raises:
        ModelError: the tokenizer has ids that the model lacks.
    """
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= vocab_size:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path or '(unnamed)'} has id {highest} (token {token!r}) but model "
            f"{model} has only {vocab_size} embeddings, ids 0 to {vocab_size - 1}; use the tokenizer the model was "
            "trained with, or resize the model's embeddings")
