"""Tokenisation: texts to flat token columns, with or without the tokenizer's leading tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
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
        leading: add the tokenizer's leading tokens (a beginning-of-sequence token, if it has one).
    """
    if not texts:
        return []
    rows: list[list[int]] = tokenizer(
        texts, add_special_tokens=leading, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
    eos = tokenizer.eos_token
    if leading and eos is not None:  # some tokenizers also end every text; a prompt must stay open
        end = tokenizer.eos_token_id
        return [row[:-1] if row and row[-1] == end and not text.endswith(eos) else row
                for row, text in zip(rows, texts, strict=True)]
    return rows


def encode_pieces(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[Piece]]) -> list[Encoded]:
    """[N] rows of tokens; pieces are tokenised one by one, so that no token spans a border of the loss mask, as
    none spans prompt and response in sampling."""
    pieces = [piece for row in rows for piece in row]
    tokens: list[list[int]] = [[] for _ in pieces]
    for leading in (True, False):
        numbers = [i for i, piece in enumerate(pieces) if piece.leading == leading]
        for i, ids in zip(numbers, encode(tokenizer, [pieces[i].text for i in numbers], leading=leading), strict=True):
            tokens[i] = ids
    taken = iter(tokens)
    return [_join([(next(taken), piece.loss) for piece in row]) for row in rows]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[PromptText]) -> list[list[int]]:
    """[N] token ids of prompts."""
    return [tokens for tokens, _ in encode_pieces(tokenizer, [[Piece.of(prompt)] for prompt in prompts])]


class TurnEnds:
    """Ends of the assistant's turns: a special token, which the chat template writes or `close` adds."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.end, self._tokenizer = end_token(tokenizer), tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._specials = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}

    def close(self, row: Encoded) -> Encoded:
        """A row in which loss ends with the token that ends each turn, and the row with its last turn.

        What a template writes after that token (a line break) is never sampled; a turn without such a token could
        never end, so the last one gets the end-of-sequence token.
        """
        tokens, mask = list(row[0]), list(row[1])
        for start, stop in _runs(mask):
            last = next((i for i in range(stop - 1, start - 1, -1) if tokens[i] in self._specials), stop - 1)
            if not str(self._tokenizer.decode(tokens[last + 1 : stop])).strip():
                mask[last + 1 : stop] = [False] * (stop - last - 1)
        length = len(mask) - mask[::-1].index(True) if True in mask else 0
        tokens, mask = tokens[:length], mask[:length]
        if tokens and tokens[-1] not in self._specials:
            tokens, mask = [*tokens, self.end], [*mask, True]
        return tokens, mask


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """(first, one past the last) of each run of True."""
    edges = np.flatnonzero(np.diff([False, *mask, False]))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _join(parts: list[tuple[list[int], bool]]) -> Encoded:
    return [t for tokens, _ in parts for t in tokens], [loss for tokens, loss in parts for _ in tokens]
