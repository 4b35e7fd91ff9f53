"""The generator with a model as people have them: weights in several files, biases, tied heads, scaled positions, more
embeddings than the tokenizer has tokens, several ids that end a response."""

import asyncio

import numpy as np
import pytest
import torch

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts, SampleKey, offsets_of
from rlhf_ray.rewards.protocol import requests_of
from rlhf_ray.roles.generator import Generator
from tests.cluster.generators import gap, load_model, publish
from tests.real_models import PADDED, make_real_model, stop_ids
from tests.tiny_families import randomised

pytestmark = pytest.mark.cluster
ROWS = 48


def prompts_of(vocabulary):
    """ROWS prompts of three tokens."""
    tokens = np.random.default_rng(5).integers(8, vocabulary, 3 * ROWS).astype(np.int32)
    return Prompts(offsets_of([3] * ROWS), tokens, [""] * ROWS, [{} for _ in range(ROWS)], np.arange(ROWS))


def check(rollout, model, prompts, tokenizer):
    """Log-probabilities are transformers' own; every id that ends a response does, and nothing else; ids that no word
    has may be drawn, and say nothing."""
    stops, lasts = set(stop_ids("qwen")), set()
    assert gap(model, rollout) < 5e-5
    for row, reason in enumerate(rollout.finish_reasons):
        response = rollout.row(row, "tokens")[3:].tolist()
        assert not stops & set(response[:-1]) and (reason == "stop") == (response[-1] in stops)
        lasts.add(response[-1])
    assert stops <= lasts, "each of them ended some response"
    strange = rollout.tokens >= len(tokenizer)
    assert strange.any() and rollout.tokens.max() < PADDED
    for row, request in enumerate(requests_of(rollout, prompts, tokenizer)):
        words = [token for token in rollout.row(row, "tokens")[3:].tolist() if token < len(tokenizer)]
        assert request.response == tokenizer.decode(words, skip_special_tokens=True)


def test_a_model_as_people_have_them_before_and_after_a_publication(tmp_path):
    config = ModelConfig(path=str(make_real_model(tmp_path / "model", "qwen")))
    model, tokenizer = load_model(config.path), load_tokenizer(config)
    generation = GenerationConfig(max_sequences=16, kv_cache_mb=16, sampling=SamplingConfig(max_tokens=60))
    generator = Generator(config, generation, seed=0, max_context=80)
    prompts, keys = prompts_of(len(tokenizer)), [SampleKey(0, row, 0) for row in range(ROWS)]

    async def run():
        await generator.start()
        try:
            check(await generator.generate(prompts, keys, 3), model, prompts, tokenizer)
            with torch.no_grad():
                randomised(model, seed=7)
            await publish(generator, model, 1)
            check(await generator.generate(prompts, keys, 4), model, prompts, tokenizer)
        finally:
            await generator.stop()

    asyncio.run(run())
