"""Which samples of a chunk are to blame when their scores failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rlhf_ray.errors import SampleError, UnscoredSamples
from rlhf_ray.records import RewardScores, Unscored
from rlhf_ray.rewards.protocol import RewardRequest, sample_names

Score = Callable[[Sequence[RewardRequest]], Awaitable[RewardScores]]


async def score_or_blame(score: Score, requests: Sequence[RewardRequest]) -> RewardScores:
    """The scores of all requests, asked for at once.

    When that fails and samples may be to blame, each is asked about alone (sources are pure, so that is harmless), and
    those that fail again are named. What the others scored alone is not used: a score has one way to come about.

    Raises:
        UnscoredSamples: some samples have no score, each for a reason of its own.
        RewardError: a source failed as a whole, or failed for all of them together and for none alone.
    """
    try:
        return await score(requests)
    except SampleError as error:
        together = error
    reasons = await asyncio.gather(*(_reason(score, request) for request in requests))
    blamed = [Unscored(request.key, request.prompt, request.response, reason)
              for request, reason in zip(requests, reasons, strict=True) if reason is not None]
    if not blamed:
        raise together
    raise UnscoredSamples(f"no score could be given to {sample_names([sample.key for sample in blamed])}: "
                          f"{blamed[0].reason}", blamed)


async def _reason(score: Score, request: RewardRequest) -> str | None:
    """Why one request has no score; None if it has one."""
    try:
        await score([request])
    except SampleError as error:
        return str(error)
    return None
