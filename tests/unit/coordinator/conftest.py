"""Configurations and small records for the coordinator."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlhf_ray.algorithms.logprob_gap import BINS
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.records import ExperienceSummary, SampleKey


@pytest.fixture(scope="session")
def ppo_config() -> Callable[..., PPOConfig]:
    """ppo_config(prompts, chunk, staleness, steps): batches of `prompts` samples in chunks of `chunk`."""

    def build(prompts: int = 8, chunk: int = 2, staleness: int = 0, steps: int = 3, **sections: Any) -> PPOConfig:
        return PPOConfig(
            model={"path": "m"}, rewards={"main": {"type": "model", "path": "r"}},
            prompts={"path": "p"}, run={"steps": steps, "seed": 5},
            generator={"chunk": chunk}, algorithm={"mini_batches": 1},
            coordinator={"prompts_per_step": prompts, "max_staleness": staleness}, **sections,
        )

    return build


@pytest.fixture(scope="session")
def summary() -> Callable[..., ExperienceSummary]:
    """summary(keys, version, **columns): numbers about experience, small and known."""

    def build(keys: list[SampleKey], version: int = 0, **columns: Any) -> ExperienceSummary:
        n = len(keys)
        values: dict[str, Any] = {
            "scores": np.arange(n, dtype=np.float32), "kl": np.full(n, 0.5, dtype=np.float32),
            "response_lengths": np.full(n, 4, dtype=np.int32), "finished": np.ones(n, dtype=bool),
            "min_version": version, "nbytes": 10 * n, "tokens": 6 * n, "behaviour_gap": 0.25,
            "gap_histogram": np.bincount([60], minlength=BINS).astype(np.float32),  # at 0.1 nats and just above
            "gold": None, **columns,
        }
        return ExperienceSummary(**values)

    return build
