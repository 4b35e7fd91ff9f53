"""Partial rollouts: responses are aborted when new weights arrive, and continue as new requests under them.

By default an engine keeps responses in flight during an update and continues each in place. Here they are aborted; the
tokens so far, with their log-probabilities and versions, become part of the prompt of a request that samples the rest.
The result is the same record: every token has the version that sampled it.

Determinism: a response without an update in flight uses its own seed. The continuation after `n` tokens uses a seed
derived from the response's seed and `n`, so the same cut gives the same tokens on every engine. Where updates cut a
response depends on timing, as with responses that are kept; with max_staleness 0 there are no cuts.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from rlhf_ray.records import WeightOffer
from rlhf_ray.roles.engines.interface import Completion, SampleRequest, SamplingEngine

ABORTED = "abort"


class AbortableEngine(SamplingEngine, Protocol):
    """An engine that can abort its samples."""

    async def abort_samples(self) -> None:
        """Abort all responses in flight: their calls return the tokens so far, with `finish_reason` "abort"."""
        ...


class PartialRolloutEngine:
    """Wraps an engine so that responses in flight are aborted and continued when new weights are applied."""

    def __init__(self, engine: AbortableEngine) -> None:
        self._engine = engine
        self._weights_ready = asyncio.Event()
        self._weights_ready.set()

    def __getattr__(self, name: str) -> Any:
        """All other attributes are the engine's."""
        return getattr(self._engine, name)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        partial: list[Completion | None] = [None] * len(requests)
        unfinished = list(range(len(requests)))
        while unfinished:
            await self._weights_ready.wait()
            sampled = await self._engine.sample([continuation(requests[i], partial[i]) for i in unfinished])
            for i, completion in zip(unfinished, sampled, strict=True):
                before = partial[i]
                partial[i] = completion if before is None else before.followed_by(completion)
            unfinished = [i for i, completion in zip(unfinished, sampled, strict=True)
                          if completion.finish_reason == ABORTED]
        return [completion for completion in partial if completion is not None]

    async def receive(self, offer: WeightOffer) -> None:
        """See `AsynchronousEngine.receive`; responses in flight are aborted at the publication's first bucket."""
        if self._weights_ready.is_set():
            self._weights_ready.clear()
            await self._engine.abort_samples()
        await cast(Any, self._engine).receive(offer)

    async def apply(self, staged: Any, version: int) -> Any:
        """See `SamplingEngine.apply`; responses in flight are aborted first, and continued afterwards."""
        self._weights_ready.clear()
        try:
            await self._engine.abort_samples()
            return await self._engine.apply(staged, version)
        finally:
            self._weights_ready.set()


def continuation(request: SampleRequest, partial: Completion | None) -> SampleRequest:
    """The request that samples the rest of a response; the same request if there are no tokens yet."""
    count = 0 if partial is None else len(partial.tokens)
    if partial is None or not count:
        return request
    return replace(request, prompt=[*request.prompt, *partial.tokens.tolist()], max_tokens=request.max_tokens - count,
                   seed=resumed_seed(request.seed, count), sampled=count)


def resumed_seed(seed: int, count: int) -> int:
    """The seed of a response's continuation after `count` tokens, in [0, 2**63)."""
    return int.from_bytes(hashlib.blake2b(f"{seed}+{count}".encode(), digest_size=8).digest()) >> 1
