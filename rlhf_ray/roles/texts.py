"""Rollouts as text."""

from typing import TYPE_CHECKING

import numpy as np

from rlhf_ray.records import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rollout_texts(tokenizer: "PreTrainedTokenizerBase", rollout: Rollout, rows: int) -> tuple[list[str], list[str]]:
    """Prompts and responses of the first `rows` rows, special tokens left out."""
    first = [int(np.argmax(rollout.row(i, "response_mask"))) for i in range(rows)]
    prompts = [rollout.row(i, "tokens")[:n].tolist() for i, n in enumerate(first)]
    responses = [rollout.row(i, "tokens")[n:].tolist() for i, n in enumerate(first)]
    return (tokenizer.batch_decode(prompts, skip_special_tokens=True),
            tokenizer.batch_decode(responses, skip_special_tokens=True))


def finished(rollout: Rollout) -> np.ndarray:
    """[N] bool: which responses ended by themselves."""
    return np.array([reason == "stop" for reason in rollout.finish_reasons])
