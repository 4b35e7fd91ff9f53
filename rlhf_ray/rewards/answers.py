"""Turning what a source came up with into an answer: one finite number per request, or an error that says whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.errors import RewardError, SampleError
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, sample_names


def finite_scores(values: Any, requests: Sequence[RewardRequest], who: str, fix: str) -> NDArray[np.float32]:
    """[N] float32 of `values`, one for each request.

    Args:
        who: the source as the subject of a sentence: "the reward model 'x'".
        fix: what to fix, as the end of one.

    Raises:
        RewardError: not as many values as requests, or one that is not finite; names the samples.
    """
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and told below
        scores = np.asarray(values, dtype=np.float32)
    if scores.shape != (len(requests),):
        raise SampleError(f"{who} gave {_count(scores)} for {len(requests)} samples "
                          f"({sample_names([r.key for r in requests])}); it must give one number for each, {fix}")
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        keys = sample_names([requests[i].key for i in wrong])
        raise SampleError(f"{who} gave {scores[wrong[0]]} for {len(wrong)} of {len(requests)} samples ({keys}). No "
                          f"score is made up in its place: {fix}")
    return scores


def checked(answer: RewardAnswer, requests: Sequence[RewardRequest], name: str) -> RewardAnswer:
    """The answer, once it is seen to be what the protocol promises.

    Raises:
        RewardError: it is not; names the component.
    """
    who = f"rewards.{name}"
    finite_scores(answer.scores, requests, who, "fix its source")
    tokens = answer.token_rewards
    if tokens is None:
        return answer
    lengths = np.array([len(r.tokens) for r in requests])
    if tokens.shape != (lengths.sum(),) or not np.isfinite(tokens).all():
        raise RewardError(f"{who} gave token rewards of shape {tokens.shape} for {lengths.sum()} tokens, or some that "
                          "are not finite; fix its source")
    if tokens[~np.concatenate([r.response_mask for r in requests])].any():
        raise RewardError(f"{who} gave rewards to tokens that the policy did not write; fix its source")
    sums = np.add.reduceat(tokens.astype(np.float64), lengths.cumsum() - lengths)
    if not np.allclose(sums, answer.scores, rtol=1e-4, atol=1e-4):
        row = int(np.argmax(np.abs(sums - answer.scores)))
        raise RewardError(f"{who} gave {answer.scores[row]} to {sample_names([requests[row].key])}, but its token "
                          f"rewards come to {sums[row]}; fix its source")
    return answer


def _count(scores: NDArray[np.float32]) -> str:
    return f"{len(scores)} scores" if scores.ndim == 1 else f"scores of shape {scores.shape}"
