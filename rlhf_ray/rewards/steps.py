"""Where the steps of a response are: their texts, and for each the policy's token on which it ends.

The policy's tokens and the tokens of a model that judges steps need not be the same, so both meet in the text: a step
is a range of its characters, and a token stands at the characters by which it lengthens the text decoded so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.records import response_start
from rlhf_ray.rewards.protocol import RewardRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Steps:
    """The steps of one response."""

    texts: list[str]
    """[S] without separators; none is blank."""
    tokens: NDArray[np.int64]
    """[S] index, in the request's tokens, of the last token that the policy wrote of each step."""


def steps_of(request: RewardRequest, separator: str, tokenizer: PreTrainedTokenizerBase) -> Steps:
    """Split the response of a request.

    A step ends with the separators that follow it, so that the token that closes it belongs to it; the last one ends
    with the response, its end-of-sequence token included. A token in which several steps end is the last of each. Where
    a step ends in tokens that were put in (tool output), it counts for the policy's last token before.

    Args:
        tokenizer: the policy's.
    """
    begin = response_start(request.response_mask)
    ids = request.tokens[begin:].tolist()
    text = _decode(tokenizer, ids)
    pieces = split_steps(text, separator)
    ends = [*_last_tokens(tokenizer, ids, text, [end for _, end in pieces[:-1]]), len(ids) - 1][: len(pieces)]
    written = np.where(request.response_mask, np.arange(len(request.tokens)), -1)
    before = np.maximum.accumulate(written)
    return Steps([piece for piece, _ in pieces], before[np.array(ends, dtype=np.int64) + begin])


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """Each step's text and the character behind it and the separators after it; the last one ends with the text."""
    steps: list[tuple[str, int]] = []
    end = 0
    for piece in text.split(separator):
        end = min(end + len(piece) + len(separator), len(text))
        if piece.strip():
            steps.append((piece, end))
        elif steps:
            steps[-1] = (steps[-1][0], end)
    return steps


def _last_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str, ends: list[int]) -> list[int]:
    """For each character position, ascending, the token that completes the text up to it.

    The text of a prefix of the tokens only grows with the prefix, so the shortest one that reads `text[:end]` is found
    by halving. Half a character (a token of some of its bytes) does not read like the whole, and does not count.
    """
    found: list[int] = []
    for end in ends:
        low, high = (found[-1] if found else 0), len(ids) - 1
        while low < high:
            middle = (low + high) // 2
            if _decode(tokenizer, ids[: middle + 1]).startswith(text[:end]):
                high = middle
            else:
                low = middle + 1
        found.append(low)
    return found


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
