"""Logits in float32 in the real vLLM, of models in bfloat16.

The layers of these models add nothing, so the last hidden states are normalised embeddings, the same in vLLM and in
transformers bit for bit: what is left of the gap is what the heads do.
"""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.generator_parity import TransformersReference, given_rows
from rlhf_ray.roles.generator import Generator
from rlhf_ray.weights.publication import SealedBuckets
from tests.cluster.generators import CONTEXT, KEYS, PROMPTS, SHORT, VOCAB
from tests.models import make_tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_thread")]
EXACT, ROUNDED = 1e-5, 1e-2
"""Largest gaps, in nats, of logits of up to 20 that are not rounded, and the smallest of those that are."""


def make_model(folder, tied, seed=0):
    """A model in bfloat16 whose layers add nothing, with logits of 4 to 20."""
    make_tiny_llama(folder, VOCAB, tied=tied, seed=seed, scale=0.5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype="bfloat16", float32_head=True)


def make_generator(model, asked, engine="in_process", lora=None, **more):
    settings = GenerationConfig(engine=engine, max_sequences=8, kv_cache_mb=32, sampling=SHORT, **more)
    return Generator(model.model_copy(update={"float32_head": asked}), settings, 0, CONTEXT, lora=lora)


async def publish(generator, model, version):
    """All weights, in bfloat16."""
    named = dict(model.named_parameters())
    sealed = SealedBuckets([(name, tuple(p.shape), "bfloat16") for name, p in named.items()], named, 50_000,
                           lambda names: {name: named[name] for name in names})
    buckets = sealed.plan.whole.buckets
    await generator.begin_weights(version, version, buckets)
    for index in range(buckets):
        await generator.load_weights(sealed.bucket(version, index), version)
    await generator.finish_weights(version)


async def largest_gap(generator, reference, version):
    """Of sampled tokens and of given ones."""
    rollout = await generator.generate(PROMPTS, KEYS, 3)
    assert set(rollout.versions[rollout.response_mask].tolist()) == {version}
    rows = given_rows(reference.model.config, CONTEXT - 1)
    given, _ = await generator.given_logprobs(rows)
    return max(np.abs(rollout.logprobs[rollout.response_mask] - reference.logprobs(rollout)).max(),
               np.abs(given - reference.logprobs(rows)).max())


def gaps(generator, *references):
    """From each reference, whose weights are published before, except for the first."""
    async def compared():
        await generator.start()
        try:
            found = []
            assert await generator.compare_with_transformers() < EXACT, "its reference has the head that it has"
            for version, reference in enumerate(references):
                if version:
                    await publish(generator, reference.model, version)
                found.append(await largest_gap(generator, reference, version))
            return found
        finally:
            await generator.stop()

    return asyncio.run(compared())


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_log_probabilities_are_those_of_a_float32_head_before_and_after_publications(tmp_path, tied):
    model = make_model(tmp_path / "m", tied)
    others = [make_model(tmp_path / f"other{seed}", tied, seed) for seed in (7, 8)]
    references = list(map(TransformersReference, [model, *others]))
    assert max(gaps(make_generator(model, True), *references)) < EXACT
    assert min(gaps(make_generator(model, False), *references)) > ROUNDED


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"tensor_parallel": 2}], ids=["one process", "two share the vocabulary"])
def test_so_they_are_of_the_asynchronous_engine(tmp_path, more):
    model = make_model(tmp_path / "m", tied=True)
    references = [TransformersReference(model), TransformersReference(make_model(tmp_path / "other", True, 7))]
    assert max(gaps(make_generator(model, True, "async", **more), *references)) < EXACT


@pytest.mark.slow
def test_so_they_are_where_generators_compute_with_adapters(tmp_path):
    """Adapters of zeros, with which a generator starts."""
    model = make_model(tmp_path / "m", tied=True)
    reference = TransformersReference(model)
    lora = LoRAConfig(rank=4)
    assert max(gaps(make_generator(model, True, lora=lora), reference)) < EXACT
    assert min(gaps(make_generator(model, False, lora=lora), reference)) > ROUNDED
