"""Prompts for PPO and for evaluation: how they are read, and each sample's seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.data.chat import PromptFormat
from rlhf_ray.data.encoding import encode_prompts, flat_tokens
from rlhf_ray.data.faults import Faults
from rlhf_ray.data.reading import section_rows
from rlhf_ray.data.report import LoadReport
from rlhf_ray.records import Prompts, SampleKey, offsets_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stream_prompts(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, report: LoadReport,
                   faults: Faults | None = None) -> Iterator[Prompts]:
    """Blocks of tokenised prompts of one data set in file order, numbered from 0; `report` says afterwards what was
    left out (prompts of more than `max_tokens` tokens).

    Args:
        config: a section that is no mix.
        faults: takes malformed rows; when None they are an error.

    Raises:
        DataError: a file or rows that cannot be used (named), or no prompt left.
        ModelError: chat messages that the tokenizer has no template for.
    """
    faults = faults or Faults()
    form, shortest = prompt_format(config, tokenizer), np.inf
    for rows in section_rows(config, faults):
        rows, values = faults.values(rows, form.read)
        if faults.hopeless or not len(rows):
            continue
        tokens = encode_prompts(tokenizer, values)
        lengths = np.array([len(t) for t in tokens], dtype=np.int64)
        shortest, first = min(shortest, lengths.min()), report.kept
        kept = report.keep(rows, {
            "no tokens": lengths == 0, f"longer than max_tokens={config.max_tokens}": lengths > config.max_tokens})
        chats = [values[i].messages for i in kept]
        yield Prompts(
            offsets=offsets_of(lengths[kept]), tokens=flat_tokens([tokens[i] for i in kept]),
            texts=[values[i].text for i in kept], metadata=[rows.others(i, config.column) for i in kept],
            rows=np.arange(first, report.kept), messages=chats if any(chats) else None)
    faults.finish(report, f"The shortest prompt has {shortest} tokens; raise max_tokens or shorten the prompts")


def prompt_format(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> PromptFormat:
    """What the prompt column of one data set means."""
    return PromptFormat(tokenizer, config.column, system=config.system, as_chat=config.as_chat)


def sample_seed(run_seed: int, key: SampleKey) -> int:
    """The seed of one sample, in [0, 2**63): the same on every machine, attempt and Python, whatever came before."""
    named = f"{run_seed}/{key.epoch}/{key.row}/{key.sample}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest()) >> 1
