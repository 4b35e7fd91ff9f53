"""Prompts for PPO and for evaluation: read and tokenised block by block, and the seed of each sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.data.chat import PromptFormat, PromptText
from rlhf_ray.data.encoding import begins_already, encode_prompts, flat_tokens
from rlhf_ray.data.load_report import LoadReport, RowErrors
from rlhf_ray.data.row_readers import usable_blocks
from rlhf_ray.data.rows import Rows
from rlhf_ray.records import Prompts, SampleKey, offsets_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NO_PROMPT = [{"role": "user", "content": ""}]
"""The prompt of a numbered row."""
RowCheck = Callable[[Mapping[str, Any], str], None]
"""(a row's columns other than the prompt, its place); raises DataError if it cannot be used."""


def stream_prompts(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, report: LoadReport,
                   row_errors: RowErrors | None = None, checks: Sequence[RowCheck] = ()) -> Iterator[Prompts]:
    """Blocks of tokenised prompts of one data set in file order, numbered from 0; `report` counts those left out
    (prompts of more than `max_tokens` tokens).

    Args:
        config: a section that is not a mix.
        row_errors: collects malformed rows; None raises an error instead.
        checks: of every row.

    Raises:
        DataError: a file or rows that cannot be used (named), or no prompt left.
        ModelError: chat messages that the tokenizer has no template for.
    """
    row_errors = row_errors or RowErrors()
    form, shortest = prompt_format(config, tokenizer), np.inf

    def read(rows: Rows, i: int) -> PromptText:
        for check in checks:
            check(rows.others(i, config.column), rows.place(i))
        return form.read(rows, i)

    for rows, values in usable_blocks(config, row_errors, read):
        tokens = encode_prompts(tokenizer, values)
        lengths = np.array([len(t) for t in tokens], dtype=np.int64)
        shortest, first = min(shortest, lengths.min()), report.kept
        kept = report.keep(rows, {
            "no tokens": lengths == 0, f"longer than max_tokens={config.max_tokens}": lengths > config.max_tokens})
        chats = [values[i].messages for i in kept]
        for value in values:
            if value.messages is None:
                report.already.update(begins_already(tokenizer, value.text))
        yield Prompts(
            offsets=offsets_of(lengths[kept]), tokens=flat_tokens([tokens[i] for i in kept]),
            texts=[values[i].text for i in kept], metadata=[rows.others(i, config.column) for i in kept],
            rows=np.arange(first, report.kept), messages=chats if any(chats) else None)
    row_errors.finish(report, f"The shortest prompt has {shortest} tokens; raise max_tokens or shorten the prompts")


def prompt_format(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> PromptFormat:
    """How the prompt column of one data set is read. That of numbered rows is a message without text: the environment
    gives the first one."""
    numbered = config.numbers is not None
    return PromptFormat(tokenizer, "prompt" if numbered else config.column, system=None if numbered else config.system,
                        as_chat=config.as_chat or numbered, may_be_empty=numbered)


def prompt_of(text: str, messages: list[dict[str, Any]] | None) -> str | list[dict[str, Any]]:
    """The prompt as a column of the row that environments are given: its messages, or its text; "" of a numbered
    row."""
    return "" if messages == NO_PROMPT else messages or text


def sample_seed(run_seed: int, key: SampleKey) -> int:
    """The seed of one sample, in [0, 2**63): the same on every machine, in every attempt and version of Python."""
    named = f"{run_seed}/{key.epoch}/{key.row}/{key.sample}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest()) >> 1
