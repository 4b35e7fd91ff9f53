"""Preference pairs for reward models, and their split into training and held-out pairs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.data import PreferencesConfig
from rlhf_ray.data.encoding import encode, encode_prompts, end_token
from rlhf_ray.data.report import LoadReport, keep_rows
from rlhf_ray.data.rows import Rows, read_rows
from rlhf_ray.data.sequences import Pairs, Sequences, join_sequences
from rlhf_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAME = "chosen and rejected are the same"
EMPTY = "a side is neither a text nor finished"


def load_preferences(config: PreferencesConfig,
                     tokenizer: PreTrainedTokenizerBase) -> tuple[Pairs, Pairs, LoadReport]:
    """(training pairs, held-out pairs, report of what was left out: equal sides, empty sides, longer sides).

    A side ends with the end-of-sequence token, as a finished response does when it is scored during PPO. Optional
    columns `chosen_finished` and `rejected_finished` say false of a response that was cut at the length limit: it is
    then scored without one, so it is trained without one. With `config.margin` each pair has its margin.

    Raises:
        DataError: a file or row that cannot be used (named), no pair left, or no way to hold pairs out.
        ModelError: no end-of-sequence token, or chat messages without a template.
    """
    end = end_token(tokenizer)
    rows = read_rows(config.path, config.split, config.limit)
    prompt_texts, prompts = encode_prompts(rows, config.prompt, tokenizer, may_be_empty=True)
    chosen, rejected = (
        _encode_side(rows, column, flag, prompts, tokenizer, end)
        for column, flag in ((config.chosen, "chosen_finished"), (config.rejected, "rejected_finished")))
    same = np.array([np.array_equal(chosen.row(i, "tokens"), rejected.row(i, "tokens")) for i in range(len(rows))])
    prompt_lengths = np.array([len(p) for p in prompts], dtype=np.int64)
    shortest, longest = np.minimum(chosen.lengths, rejected.lengths), np.maximum(chosen.lengths, rejected.lengths)
    kept, report = keep_rows(
        rows, {SAME: same, EMPTY: shortest == prompt_lengths,
               f"a side is longer than max_tokens={config.max_tokens}": longest > config.max_tokens},
        fix="Give pairs whose sides differ, and raise max_tokens if they are too long")
    margins = None if config.margin is None else _margins(rows, config.margin)[kept]
    pairs = Pairs(chosen.select(kept), rejected.select(kept), margins)
    groups = [prompt_texts[i] or rows.text(i, config.chosen, may_be_empty=True) for i in kept]
    held = held_out_rows(groups, config.held_out)
    return pairs.select(np.flatnonzero(~held)), pairs.select(np.flatnonzero(held)), report


def held_out_rows(groups: list[str], share: float) -> NDArray[np.bool_]:
    """[N] True on rows to hold out: whole groups, about `share` of all rows (if > 0, some but not all).

    Groups are the prompts (or, without a prompt, the chosen texts), so nothing is measured on a prompt that was trained
    on. They are taken in the order of their digests: the choice needs no seed, and does not hang on the order of rows.

    Raises:
        DataError: share > 0, but all rows are of one group.
    """
    held = np.zeros(len(groups), dtype=bool)
    if share == 0:
        return held
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    if len(members) == 1:
        raise DataError(f"held_out={share} of {len(groups)} pairs: all share one prompt, so none can be held out; give "
                        "more prompts, or set held_out to 0")
    target, count = min(max(1, round(share * len(groups))), len(groups) - 1), 0
    for group in sorted(members, key=_digest):
        if count + len(members[group]) <= target:
            held[members[group]] = True
            count += len(members[group])
    if not count:
        held[members[min(members, key=lambda g: (len(members[g]), _digest(g)))]] = True
    return held


def _margins(rows: Rows, column: str) -> NDArray[np.float32]:
    """[N] the margins in a column.

    Raises:
        DataError: a row without the column, or whose value is no number of at least 0.
    """
    margins = np.array([rows.number(i, column) for i in range(len(rows))], dtype=np.float32)
    if len(negative := np.flatnonzero(margins < 0)):
        raise DataError(f"{rows.place(negative[0])}: column {column!r} is {margins[negative[0]]:g}; a margin says how "
                        "much better the chosen response is, so exchange chosen and rejected, or give 0")
    return margins


def _digest(group: str) -> bytes:
    return hashlib.blake2b(group.encode(), digest_size=16).digest()


def _encode_side(rows: Rows, column: str, flag: str, prompts: list[list[int]], tokenizer: PreTrainedTokenizerBase,
                 end: int) -> Sequences:
    """Prompt and one response per row. Only a row that says how its response ended may have an empty one."""
    finished = [rows.flag(i, flag, default=True) for i in range(len(rows))]
    texts = [rows.text(i, column, may_be_empty=record.get(flag) is not None) for i, record in enumerate(rows.records)]
    responses = encode(tokenizer, texts, leading=False)
    return join_sequences(prompts, [r + [end] if done else r for r, done in zip(responses, finished, strict=True)])
