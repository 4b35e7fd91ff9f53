"""Rollouts as requests: the words that go with the token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlhf_ray.records import Prompts, Rollout, response_start
from rlhf_ray.rewards.protocol import RewardRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

def requests_of(rollout: Rollout, prompts: Prompts, tokenizer: PreTrainedTokenizerBase) -> list[RewardRequest]:
    """[N] requests of a rollout's rows. `prompts` holds the prompts that they answer, in any order."""
    places = {row: i for i, row in enumerate(prompts.rows.tolist())}
    return [_request(rollout, i, prompts, places[key.row], tokenizer) for i, key in enumerate(rollout.keys)]


def _request(
    rollout: Rollout, i: int, prompts: Prompts, row: int, tokenizer: PreTrainedTokenizerBase
) -> RewardRequest:
    tokens, mask = rollout.row(i, "tokens"), rollout.row(i, "response_mask")
    begin = response_start(mask)
    return RewardRequest(
        key=rollout.keys[i], prompt=prompts.texts[row],
        response=tokenizer.decode(tokens[begin:].tolist(), skip_special_tokens=True),
        tokens=tokens, response_mask=mask, finish_reason=rollout.finish_reasons[i], metadata=prompts.metadata[row],
        messages=None if prompts.messages is None else prompts.messages[row],
    )


def rollout_texts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout, rows: int) -> tuple[list[str], list[str]]:
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
