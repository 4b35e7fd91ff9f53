"""Requests, and a source that asks one or more servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from rlhf_ray.config.rewards import HTTPReward
from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.http.source import HTTPSource
from rlhf_ray.rewards.protocol import RewardRequest


def requests_of(count: int, first: int = 0) -> list[RewardRequest]:
    """Requests whose scores, by the fault server, are first, first + 1, ..."""
    return [RewardRequest(
        key=SampleKey(0, i, 0), prompt=f"Question {i}", response=f"Answer {i}",
        tokens=np.array([i, 7, 8], np.int32), response_mask=np.array([False, True, True]),
        finish_reason="stop" if i % 2 else "length", metadata={"answer": str(i), "other": i},
    ) for i in range(first, first + count)]


@asynccontextmanager
async def source_of(*urls: str, **settings: object) -> AsyncIterator[HTTPSource]:
    """A started source."""
    source = HTTPSource("quality", HTTPReward.model_validate(
        {"type": "http", "urls": list(urls), "request_timeout_s": 20, "timeout_s": 60, **settings}))
    await source.start()
    try:
        yield source
    finally:
        await source.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Tries follow each other quickly."""
    from rlhf_ray.rewards.http import circuit_breaker, health, source

    monkeypatch.setattr(source, "FIRST_DELAY_S", 0.005)
    monkeypatch.setattr(source, "LONGEST_DELAY_S", 0.05)
    monkeypatch.setattr(health, "DELAY_S", 0.01)
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 0.1)
