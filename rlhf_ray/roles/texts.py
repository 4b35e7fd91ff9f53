"""Rollouts as text."""

from typing import TYPE_CHECKING

import numpy as np

from rlhf_ray.records import Rollout, response_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rollout_texts(tokenizer: "PreTrainedTokenizerBase", rollout: Rollout, rows: int) -> tuple[list[str], list[str]]:
    """Prompts and responses of the first `rows` rows, or of all there are, special tokens left out; a row without
    response is all prompt."""
    prompts, responses = [], []
    for i in range(min(rows, len(rollout))):
        tokens, mask = rollout.row(i, "tokens"), rollout.row(i, "response_mask")
        begin = response_start(mask)
        prompts.append(tokenizer.decode(tokens[:begin].tolist(), skip_special_tokens=True))
        responses.append(tokenizer.decode(tokens[begin:].tolist(), skip_special_tokens=True))
    return prompts, responses


def finished(rollout: Rollout) -> np.ndarray:
    """[N] bool: which responses ended by themselves."""
    return np.array([reason == "stop" for reason in rollout.finish_reasons])
