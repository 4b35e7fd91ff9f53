"""Demonstrations for supervised fine-tuning: whole texts, or prompts with responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.data.encoding import encode, encode_prompts, end_token
from rlhf_ray.data.report import LoadReport, keep_rows
from rlhf_ray.data.rows import Rows, read_rows
from rlhf_ray.data.sequences import Sequences, join_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_demonstrations(config: DemonstrationsConfig,
                        tokenizer: PreTrainedTokenizerBase) -> tuple[Sequences, LoadReport]:
    """Token sequences in file order, each ended by the end-of-sequence token, and what was left out (longer rows).

    All tokens of a plain text carry loss; of a prompt with a response, the response's and the final token do.

    Raises:
        DataError: a file or row that cannot be used (named), or no row left.
        ModelError: no end-of-sequence token, or chat messages without a template.
    """
    end = end_token(tokenizer)
    rows = read_rows(config.path, config.split, config.limit)
    prompts, responses = _encode_rows(rows, config, tokenizer)
    sequences = join_sequences(prompts, [response + [end] for response in responses])
    kept, report = keep_rows(
        rows, {f"longer than max_tokens={config.max_tokens}": sequences.lengths > config.max_tokens},
        fix=f"The shortest row has {sequences.lengths.min()} tokens; raise max_tokens or shorten the texts")
    return (sequences if report.kept == report.rows else sequences.select(kept)), report


def _encode_rows(rows: Rows, config: DemonstrationsConfig,
                 tokenizer: PreTrainedTokenizerBase) -> tuple[list[list[int]], list[list[int]]]:
    """[N] tokens without loss and [N] tokens with loss."""
    if config.prompt is None:
        texts = [rows.text(i, config.text) for i in range(len(rows))]
        return [[] for _ in texts], encode(tokenizer, texts, leading=True)
    _, prompts = encode_prompts(rows, config.prompt, tokenizer)
    responses = [rows.text(i, config.response) for i in range(len(rows))]
    return prompts, encode(tokenizer, responses, leading=False)
