"""What the roles work on: random models and rows of random tokens, each row of the same length."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.growth.settings import CONTEXT, PROMPT, VOCABULARY, Size
from benchmarks.workload import REVIEWS_FOR_TOKENIZER, SEED
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.data.synthetic_reviews import make_reviews
from rlhf_ray.data.tokenizer import train_tokenizer
from rlhf_ray.models.loading import load_scalar_model, load_tokenizer, new_causal_lm
from rlhf_ray.records import Experience, Prompts, Rollout, SampleKey, offsets_of

POLICY, REWARD = "policy", "reward"
"""Directories of the models."""


def make_models(directory: Path, size: Size) -> None:
    """Save a random policy and a random reward model of its shape, with their tokenizer."""
    disable_progress_bar()
    torch.manual_seed(SEED)
    policy, reward = directory / POLICY, directory / REWARD
    train_tokenizer((review.text for review in make_reviews(REVIEWS_FOR_TOKENIZER, SEED)), VOCABULARY, policy)
    model = new_causal_lm(NewModelConfig(architecture=size.architecture, tokenizer=str(policy)))
    for config in (model.config, model.generation_config):
        config.eos_token_id = None  # vLLM would end responses there, whatever else is asked for
    model.save_pretrained(policy)
    load_scalar_model(policy_config(directory), new_head=True).save_pretrained(reward)
    load_tokenizer(policy_config(directory)).save_pretrained(reward)


def policy_config(directory: Path) -> ModelConfig:
    """The policy, in float32."""
    return ModelConfig(path=str(directory / POLICY))


def prompts(count: int) -> Prompts:
    """`count` prompts of `PROMPT` random tokens."""
    tokens = np.random.default_rng(SEED).integers(4, VOCABULARY, count * PROMPT).astype(np.int32)
    return Prompts(offsets=offsets_of([PROMPT] * count), tokens=tokens, texts=[""] * count,
                   metadata=[{} for _ in range(count)], rows=np.arange(count))


def columns(count: int, length: int) -> dict[str, Any]:
    """Columns that a rollout and experience of `count` rows have in common: tokens, where the responses are, keys."""
    assert PROMPT + length <= CONTEXT
    row = PROMPT + length
    return {
        "offsets": offsets_of([row] * count),
        "tokens": np.random.default_rng(SEED).integers(4, VOCABULARY, count * row).astype(np.int32),
        "response_mask": np.tile(np.arange(row) >= PROMPT, count),
        "keys": [SampleKey(0, i, 0) for i in range(count)],
    }


def rollout(count: int, length: int) -> Rollout:
    """Rows as a generator would have made them."""
    shared = columns(count, length)
    mask = shared["response_mask"]
    return Rollout(**shared, logprobs=np.where(mask, -7, 0).astype(np.float32),
                   versions=np.where(mask, 0, -1).astype(np.int32), seeds=np.zeros(count, dtype=np.int64),
                   finish_reasons=["length"] * count)


def experience(count: int, length: int) -> Experience:
    """Rows as an assembler would have made them, with random advantages. (A random model gives each token about
    1/1024, so these log-probabilities keep ratios near 1.)"""
    shared = columns(count, length)
    mask = shared["response_mask"]
    logprobs = np.where(mask, -np.log(VOCABULARY), 0).astype(np.float32)
    gains = np.where(mask, np.random.default_rng(SEED).standard_normal(len(mask)), 0).astype(np.float32)
    return Experience(**shared, behaviour_logprobs=logprobs, old_logprobs=logprobs, reference_logprobs=logprobs,
                      values=np.zeros_like(logprobs), advantages=gains, returns=gains)
