"""The rows of a rollout, from what generators were asked and what they sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.records import Episode, Rollout, SampleKey, offsets_of
from rlhf_ray.roles.engines.interface import Completion, SampleRequest

MASK_MARGIN = 2
"""With top-k sampling, this many times k most likely tokens are requested from vLLM, which keeps all tokens that are as
likely as the k-th; in half precision there may be several."""


def sample_request(prompt: list[int], sampling: SamplingConfig, most: int, seed: int, stop_tokens: Sequence[int],
                   vocabulary: int = 0) -> SampleRequest:
    """A request for a response of at most so many tokens.

    Args:
        stop_tokens: of the model.
        vocabulary: of the model, if the sampling mask of each token is recorded, else 0.
    """
    return SampleRequest(prompt, sampling, most, seed, sorted({*stop_tokens, *sampling.stop_token_ids}),
                         top_logprobs=min(MASK_MARGIN * sampling.top_k, vocabulary))


def as_rollout(
    keys: list[SampleKey], requests: Sequence[SampleRequest], completions: Sequence[Completion], masks: bool = False
) -> Rollout:
    """Prompts and responses as one record, one row per sample; with `masks`, also the sampling masks, if there are
    any."""
    rows = [Segment([Sampled(request.prompt, request, completion)], request.seed, completion.finish_reason)
            for request, completion in zip(requests, completions, strict=True)]
    return rollout_of(rows, keys, list(range(len(rows))), masks)


class Sampled(NamedTuple):
    """A part of a row: tokens that the policy read, and what it sampled after them."""

    read: Sequence[int]
    request: SampleRequest
    completion: Completion


class Segment(NamedTuple):
    """One row of a rollout."""

    parts: list[Sampled]
    seed: int
    """As in `Rollout.seeds`."""
    finish_reason: str
    rest: Sequence[int] = ()
    """Tokens that it ends with, which the policy read before it sampled nothing."""


def rollout_of(
    rows: Sequence[Segment], keys: list[SampleKey], samples: Sequence[int], masks: bool,
    episodes: list[Episode] | None = None,
) -> Rollout:
    """Rows as one record.

    Args:
        keys: of the samples.
        samples: number of each row's sample.
        masks: with the sampling masks, if there are any.
        episodes: of the samples, if they are episodes.
    """
    def column(before: Any, sampled: str, dtype: Any) -> Any:
        columns: list[Any] = [np.empty(0)]
        for row in rows:
            for part in row.parts:
                columns += [np.full(len(part.read), before), getattr(part.completion, sampled)]
            columns.append(np.full(len(row.rest), before))
        return np.concatenate(columns).astype(dtype)

    tokens: list[Any] = []
    lengths = []
    for row in rows:
        of_row = [each for part in row.parts for each in (part.read, part.completion.tokens)] + [row.rest]
        tokens += [np.asarray(each, dtype=np.int32) for each in of_row]
        lengths.append(sum(map(len, of_row)))
    versions = column(-1, "versions", np.int32)
    sampled = np.array([sum(len(part.completion.tokens) for part in row.parts) for row in rows])
    mask_sizes, mask_tokens = sampling_masks(rows) if masks else (None, None)
    return Rollout(
        offsets=offsets_of(lengths),
        tokens=np.concatenate(tokens).astype(np.int32),
        response_mask=versions >= 0,
        logprobs=column(0.0, "logprobs", np.float32),
        versions=versions,
        samples=np.asarray(samples, dtype=np.int64),
        row_weights=_shares(sampled, np.asarray(samples, dtype=np.int64)),
        keys=list(keys),
        seeds=np.asarray([row.seed for row in rows], dtype=np.int64),
        finish_reasons=[row.finish_reason for row in rows],
        mask_sizes=mask_sizes, mask_tokens=mask_tokens, episodes=episodes,
    )


def _shares(sampled: NDArray[np.int64], samples: NDArray[np.int64]) -> NDArray[np.float32]:
    """[N] each row's share of the tokens that were sampled in its sample; equal shares where none were."""
    of_sample = np.bincount(samples, weights=sampled)[samples]
    equal = 1 / np.bincount(samples)[samples]
    return np.divide(sampled, of_sample, out=equal, where=of_sample > 0).astype(np.float32)


def sampling_masks(rows: Sequence[Segment]) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
    """`mask_sizes` and `mask_tokens` of a rollout: the tokens that were kept, or the stop tokens that were excluded at
    the beginning of a response; None if all tokens were possible."""
    sizes: list[int] = []
    listed: list[Any] = []
    for row in rows:
        for read, request, completion in row.parts:
            excluded = min(request.min_tokens, len(completion.tokens))
            masks = completion.masks or [request.stop_tokens] * excluded
            sign = 1 if completion.masks else -1
            unmasked = len(completion.tokens) - len(masks)
            sizes += [0] * len(read) + [sign * len(mask) for mask in masks] + [0] * unmasked
            listed += masks
        sizes += [0] * len(row.rest)
    if not listed:
        return None, None
    return np.asarray(sizes, dtype=np.int32), np.concatenate(listed).astype(np.int32)
