"""Finds the samples of a chunk that cause a scoring error, by scoring each one alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from rlhf_ray.errors import SampleError, UnscoredSamples
from rlhf_ray.records import RewardScores, Unscored
from rlhf_ray.rewards.protocol import RewardRequest, all_ended, sample_names

Score = Callable[[Sequence[RewardRequest]], Awaitable[RewardScores]]


async def score_or_name_failed(score: Score, requests: Sequence[RewardRequest]) -> RewardScores:
    """The scores of all requests, scored together.

    If that fails because of a sample, each is scored alone (sources are pure, so this is harmless), and those that fail
    again are named. The scores of the others are not used, so that all scores come from whole chunks. If none fails
    again, as when a function was blocked by chance, all are scored together once more.

    Raises:
        UnscoredSamples: some samples have no score; it has the reason of each.
        RewardError: a source failed as a whole, or failed twice for all samples together and for none alone.
    """
    with suppress(SampleError):
        return await score(requests)
    reasons = await all_ended(*(_reason(score, request) for request in requests))
    failed = [Unscored(request.key, request.prompt, request.response, reason)
              for request, reason in zip(requests, reasons, strict=True) if reason is not None]
    if not failed:
        return await score(requests)
    raise UnscoredSamples(f"no score could be given to {sample_names([sample.key for sample in failed])}: "
                          f"{failed[0].reason}", failed)


async def _reason(score: Score, request: RewardRequest) -> str | None:
    """The reason why one request has no score; None if it has one."""
    try:
        await score([request])
    except SampleError as error:
        return str(error)
    return None
