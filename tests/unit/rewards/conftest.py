"""Requests by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.protocol import RewardRequest


@pytest.fixture(scope="session")
def ask() -> Callable[..., RewardRequest]:
    """ask(response, row=0, **fields of the request): a response of as many tokens as words, after a prompt of two."""

    def build(response: str, row: int = 0, **fields: Any) -> RewardRequest:
        words = max(1, len(response.split()))
        given = {
            "key": SampleKey(0, row, 0), "prompt": "a prompt", "response": response,
            "tokens": np.arange(2, 4 + words, dtype=np.int32), "finish_reason": "stop", "metadata": {},
            "response_mask": np.array([False, False] + [True] * words),
        }
        return RewardRequest(**(given | fields))

    return build
