"""Tokenisation: texts to flat token columns, with or without the tokenizer's leading tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.data.chat import PromptText
from rlhf_ray.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Piece:
    """A part of a row whose tokens all carry loss, or none."""

    text: str
    loss: bool
    leading: bool = False
    """Whether the tokenizer adds its leading tokens."""

    @classmethod
    def of(cls, prompt: PromptText) -> Piece:
        """A prompt: no loss."""
        return cls(prompt.text, loss=False, leading=prompt.messages is None)


Encoded = tuple[list[int], list[bool]]
"""(token ids of a row, True on those that carry loss)."""


def flat_tokens(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """All tokens of all rows, one after another."""
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=sum(map(len, rows)))


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends a sequence.

    Raises:
        ModelError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer {tokenizer.name_or_path or '(unnamed)'} has no end-of-sequence token, and "
                         "responses could never end; set eos_token in its tokenizer_config.json")
    return int(tokenizer.eos_token_id)


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, leading: bool) -> list[list[int]]:
    """[N] lists of token ids, never with an end-of-sequence token added.

    Args:
        leading: add the tokenizer's leading tokens (a beginning-of-sequence token, if it has one), except to a text
            that begins with it already.
    """
    if not texts:
        return []
    rows: list[list[int]] = tokenizer(
        texts, add_special_tokens=leading, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
    if not leading:
        return rows
    eos = tokenizer.eos_token
    if eos is not None:  # some tokenizers also end every text; a prompt must stay open
        end = tokenizer.eos_token_id
        rows = [row[:-1] if _added_end(row, text, eos, end) else row for row, text in zip(rows, texts, strict=True)]
    begin = tokenizer.bos_token_id
    return [row[1:] if begins_already(tokenizer, text) and row[:2] == [begin, begin] else row
            for row, text in zip(rows, texts, strict=True)]


def begins_already(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The beginning-of-sequence token, if a text begins with it; else nothing."""
    begin = tokenizer.bos_token
    return [begin] if begin is not None and text.startswith(begin) else []


def _added_end(row: list[int], text: str, eos: str, end: int) -> bool:
    """Whether the tokenizer put an end-of-sequence token after the text, which may have one of its own."""
    return bool(row) and row[-1] == end and (not text.endswith(eos) or row[-2:] == [end, end])


def encode_pieces(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[Piece]]) -> list[Encoded]:
    """[N] rows of tokens. No token spans a border of the loss mask, as none spans prompt and response in sampling, and
    a piece has the tokens that it has after the pieces before it."""
    if puts_blank_first(tokenizer):
        return _encode_in_context(tokenizer, rows)
    pieces = [piece for row in rows for piece in row]
    tokens: list[list[int]] = [[] for _ in pieces]
    for leading in (True, False):
        numbers = [i for i, piece in enumerate(pieces) if piece.leading == leading]
        for i, ids in zip(numbers, encode(tokenizer, [pieces[i].text for i in numbers], leading=leading), strict=True):
            tokens[i] = ids
    taken = iter(tokens)
    return [_join([(next(taken), piece.loss) for piece in row]) for row in rows]


BREAK = "\n"
"""A text before which a blank that a tokenizer puts first cannot hide: it joins no token of a text after it."""


@lru_cache(maxsize=8)
def puts_blank_first(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text has other tokens at the beginning than after another text, as with SentencePiece, which puts a
    blank before it."""
    alone, after = encode(tokenizer, ["a", BREAK + "a"], leading=False)
    [broken] = encode(tokenizer, [BREAK], leading=False)
    return after[len(broken) :] != alone


def encode_after_text(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """[N] token ids of texts that follow another text, without a blank that the tokenizer puts first."""
    texts = list(texts)
    if not texts or not puts_blank_first(tokenizer):
        return encode(tokenizer, texts, leading=False)
    [broken] = encode(tokenizer, [BREAK], leading=False)
    alone = encode(tokenizer, texts, leading=False)
    after = encode(tokenizer, [BREAK + text for text in texts], leading=False)
    return [ids[len(broken) :] if ids[: len(broken)] == broken else others
            for ids, others in zip(after, alone, strict=True)]


CONTEXT = 8
"""Tokens before a text with which it is decoded, if it is decoded without its first blank otherwise."""


def decode_after(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], tokens: Sequence[int], *,
                 skip_special_tokens: bool = False) -> str:
    """The text that `tokens` add to that of the tokens `before` them."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens,
                                    clean_up_tokenization_spaces=False))

    if not puts_blank_first(tokenizer):
        return decode(tokens)
    context = list(before[-CONTEXT:])
    start, whole = decode(context), decode([*context, *tokens])
    return whole.removeprefix(start) if start and whole.startswith(start) else decode(tokens)


def _encode_in_context(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[Piece]]) -> list[Encoded]:
    """As `encode_pieces`, by tokenising each row up to the end of each piece. Where a token would span a border, the
    piece after it is tokenised as a text that follows another one."""
    ends = [list(accumulate(piece.text for piece in row)) for row in rows]
    tokens: dict[tuple[bool, str], list[int]] = {}
    for leading in (True, False):
        texts = list({text: None for row, wholes in zip(rows, ends, strict=True) if row and row[0].leading == leading
                      for text in wholes})
        tokens |= {(leading, text): ids
                   for text, ids in zip(texts, encode(tokenizer, texts, leading=leading), strict=True)}
    found: list[list[tuple[list[int] | None, Piece]]] = []
    for row, wholes in zip(rows, ends, strict=True):
        parts: list[tuple[list[int] | None, Piece]] = []
        before: list[int] = []
        for piece, text in zip(row, wholes, strict=True):
            whole = tokens[row[0].leading, text]
            parts.append((whole[len(before) :] if whole[: len(before)] == before else None, piece))
            before = whole
        found.append(parts)
    others = iter(encode_after_text(tokenizer, [p.text for parts in found for ids, p in parts if ids is None]))
    return [_join([(next(others) if ids is None else ids, piece.loss) for ids, piece in parts]) for parts in found]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[PromptText]) -> list[list[int]]:
    """[N] token ids of prompts."""
    return [tokens for tokens, _ in encode_pieces(tokenizer, [[Piece.of(prompt)] for prompt in prompts])]


def _join(parts: list[tuple[list[int], bool]]) -> Encoded:
    return [t for tokens, _ in parts for t in tokens], [loss for tokens, loss in parts for _ in tokens]
