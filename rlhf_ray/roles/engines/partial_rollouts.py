"""Responses that are aborted when new weights arrive, and go on as new requests under them.

An engine keeps responses in flight through an update and goes on with each in place. Here they are ended instead, with
what they have; the tokens so far, with their log-probabilities and versions, become a part of the prompt of a request
that draws the rest. The response is the same record in the end: every token says which version made it.

What is deterministic: a response that no update meets is drawn with its own seed, as ever. What follows `n` tokens is
drawn with a seed that follows from the response's seed and `n`, so the same cut gives the same tokens on every engine.
Where updates meet a response is a matter of timing, here as with requests that are kept; at max_staleness 0 they meet
none.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np

from rlhf_ray.records import WeightOffer
from rlhf_ray.roles.engines.interface import Completion, SampleRequest, SamplingEngine

ABORTED = "abort"


class AbortableEngine(SamplingEngine, Protocol):
    """An engine that can end what it samples."""

    async def abort_samples(self) -> None:
        """End all responses in flight: their calls return with the tokens so far, and `finish_reason` "abort"."""
        ...


class PartialRolloutEngine:
    """Another engine, but for what happens to responses in flight when weights are put in service."""

    def __init__(self, engine: AbortableEngine) -> None:
        self._engine = engine
        self._in_service = asyncio.Event()
        self._in_service.set()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the engine's own."""
        return getattr(self._engine, name)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See `SamplingEngine.sample`."""
        made: list[Completion | None] = [None] * len(requests)
        left = list(range(len(requests)))
        while left:
            await self._in_service.wait()
            drawn = await self._engine.sample([continuation(requests[i], made[i]) for i in left])
            for i, completion in zip(left, drawn, strict=True):
                made[i] = joined(made[i], completion)
            left = [i for i, completion in zip(left, drawn, strict=True) if completion.finish_reason == ABORTED]
        return [completion for completion in made if completion is not None]

    async def receive(self, offer: WeightOffer) -> None:
        """See `AsynchronousEngine.receive`; responses in flight are aborted at the publication's first bucket."""
        if self._in_service.is_set():
            self._in_service.clear()
            await self._engine.abort_samples()
        await cast(Any, self._engine).receive(offer)

    async def apply(self, staged: Any, version: int) -> Any:
        """See `SamplingEngine.apply`; responses in flight are aborted first, and go on afterwards."""
        self._in_service.clear()
        try:
            await self._engine.abort_samples()
            return await self._engine.apply(staged, version)
        finally:
            self._in_service.set()


def continuation(request: SampleRequest, made: Completion | None) -> SampleRequest:
    """The request that draws what is missing of a response; the same request when nothing was made."""
    count = 0 if made is None else len(made.tokens)
    if made is None or not count:
        return request
    return replace(request, prompt=[*request.prompt, *made.tokens.tolist()], max_tokens=request.max_tokens - count,
                   seed=resumed_seed(request.seed, count))


def resumed_seed(seed: int, count: int) -> int:
    """The seed of what follows the first `count` tokens of a response, in [0, 2**63)."""
    return int.from_bytes(hashlib.blake2b(f"{seed}+{count}".encode(), digest_size=8).digest()) >> 1


def joined(made: Completion | None, more: Completion) -> Completion:
    """A response and what was drawn after it, as one."""
    if made is None:
        return more
    return Completion(np.concatenate([made.tokens, more.tokens]), np.concatenate([made.logprobs, more.logprobs]),
                      np.concatenate([made.versions, more.versions]), more.finish_reason)
