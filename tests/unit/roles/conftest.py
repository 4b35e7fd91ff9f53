"""A small rollout by hand, and tiny models on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.records import (
    Experience,
    ExperienceSummary,
    RewardScores,
    RewardTerms,
    Rollout,
    SampleKey,
    TokenScores,
    offsets_of,
)
from rlhf_ray.roles.assembler import Assembler
from tests.models import make_tiny_llama, make_tiny_reward_model

VOCABULARY = 40


def rollout_of(masks: list[list[int]], finish_reasons: list[str] | None = None, seed: int = 0) -> Rollout:
    """Rows with these response masks (1 on response tokens), random tokens from 2 on and small random logprobs."""
    random, mask = np.random.default_rng(seed), np.concatenate(masks).astype(bool)
    logprobs = np.where(mask, -random.random(len(mask)), 0).astype(np.float32)
    return Rollout(
        offsets=offsets_of([len(m) for m in masks]),
        tokens=random.integers(2, VOCABULARY, len(mask)).astype(np.int32), response_mask=mask, logprobs=logprobs,
        versions=np.where(mask, 4, -1).astype(np.int32), keys=[SampleKey(0, row, 0) for row in range(len(masks))],
        seeds=np.arange(len(masks)), finish_reasons=finish_reasons or ["stop"] * len(masks),
    )


def assemble_one(
    assembler: Assembler, terms: RewardTerms, policy_ranks: int, rollout: Rollout,
    rewards: RewardScores, *scores: TokenScores | None,
) -> tuple[Experience, ExperienceSummary]:
    """`Assembler.assemble` of one rollout; `scores` are the reference's and the ranks' parts."""
    reference, *parts = scores
    experience, (summary,) = assembler.assemble(
        terms, [rollout], [rewards], reference, parts[:policy_ranks], parts[policy_ranks:])
    return experience, summary


@pytest.fixture
def rollout() -> Rollout:
    """Three rows of 5, 3 and 6 tokens; the last has a gap of two inserted tokens inside its response."""
    return rollout_of([[0, 0, 1, 1, 1], [0, 1, 1], [0, 1, 0, 0, 1, 1]])


@pytest.fixture(scope="session")
def policy_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("models") / "policy"
    return ModelConfig(path=str(make_tiny_llama(directory, vocab=VOCABULARY, hidden=32, heads=1)))


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("models") / "reward"
    return ModelConfig(path=str(make_tiny_reward_model(directory, vocab=VOCABULARY)))


@pytest.fixture(scope="session")
def transformers_model() -> Callable[[str, str], Any]:
    """transformers_model(auto class name, directory): as a user of transformers would load it."""
    import transformers

    return lambda auto, directory: getattr(transformers, auto).from_pretrained(Path(directory)).eval()
