"""Publications of adapters alone on the real vLLM, which computes with them beside the frozen base: held against
transformers' forward pass of the model that is trained."""

import asyncio
import copy
from dataclasses import replace
from itertools import pairwise

import psutil
import pytest
import torch

from rlhf_ray.config.adapter_publication import ADAPTER_FAMILIES
from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import DamagedBucket, WeightsError
from rlhf_ray.models.lora import Adapters
from rlhf_ray.roles.generator import Generator
from rlhf_ray.weights.publication import SealedBuckets
from tests.cluster.generator_families import MODELS, TIED, UNTIED, make_model
from tests.cluster.generator_families import VOCAB as TOKENS
from tests.cluster.generators import CONTEXT, KEYS, LONG, PROMPTS, SHORT, VOCAB, gap, load_model
from tests.models import make_tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
LORA = LoRAConfig(rank=4, alpha=12)
FLOAT32 = 1e-4
"""Largest difference between log-probabilities of a generator and of a learner."""


class Learner:
    """A model in training with adapters, as publications see it."""

    def __init__(self, directory, lora=LORA, dtype="float32"):
        self.model, self.dtype = load_model(directory), dtype
        self.adapters = Adapters(self.model, lora, str(directory))

    def train(self, seed):
        """Give every adapter random values."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)

    def sealed(self, bucket_bytes=10_000):
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
        specs = [(name, shape, self.dtype) for name, shape in self.adapters.published_shapes(shapes)]
        return SealedBuckets(specs, [name for name, *_ in specs], bucket_bytes,
                             lambda names: self.adapters.published(names, tensors))

    def buckets(self, version):
        sealed = self.sealed()
        return [sealed.bucket(version, index) for index in range(sealed.plan.whole.buckets)]


def make_generator(directory, lora=LORA, dtype="float32", **options):
    settings = GenerationConfig(engine=options.pop("engine", "in_process"), max_sequences=8, kv_cache_mb=32,
                                sampling=SHORT, **options.pop("generation", {}))
    return Generator(ModelConfig(path=str(directory), dtype=dtype), settings, 0, CONTEXT, lora=lora, **options)


async def publish(generator, buckets):
    version = buckets[0].version
    await generator.begin_weights(version, version, len(buckets))
    for bucket in buckets:
        await generator.load_weights(bucket, version)
    assert (await generator.finish_weights(version)).version == version


async def run_versions(directory, prompts=PROMPTS, **options):
    """Rollouts of versions 0 to 3, and the models that they must agree with."""
    learner, generator = Learner(directory), make_generator(directory, **options)
    await generator.start()
    try:
        seen = [(load_model(directory), await generator.generate(prompts, KEYS, 3))]
        for version in (1, 2, 3):
            learner.train(version)
            await publish(generator, learner.buckets(version))
            rollout = await generator.generate(prompts, KEYS, 3)
            assert set(rollout.versions[rollout.response_mask]) == {version}
            seen.append((copy.deepcopy(learner.model), rollout))
        return seen
    finally:
        await generator.stop()


@pytest.mark.parametrize(("tied", "options"), [
    (True, {}),
    pytest.param(False, {}, marks=pytest.mark.slow),
    pytest.param(False, {"engine": "async"}, marks=pytest.mark.slow),
    pytest.param(True, {"engine": "async", "generation": {"tensor_parallel": 2}}, marks=pytest.mark.slow),
])
def test_after_each_publication_log_probabilities_are_the_learners(tied, options, tmp_path):
    seen = asyncio.run(run_versions(make_tiny_llama(tmp_path / "model", VOCAB, tied=tied), **options))
    assert max(gap(model, rollout) for model, rollout in seen) < FLOAT32
    assert min(gap(older, rollout) for (older, _), (_, rollout) in pairwise(seen)) > 1, "each version is another model"


def test_a_publication_is_a_twentieth_of_the_merged_weights_and_memory_stays_flat(tmp_path):
    async def run():
        directory = make_tiny_llama(tmp_path / "model", VOCAB, hidden=256, layers=4)
        learner, generator = Learner(directory), make_generator(directory)
        whole = sum(tensor.nbytes for tensor in load_model(directory).parameters())
        sealed = learner.sealed()
        assert sealed.plan.whole == sealed.plan.changing
        assert sealed.plan.whole.nbytes == sum(sum(bucket.nbytes for bucket in bucket.entries)
                                               for bucket in learner.buckets(1))
        assert sealed.plan.whole.nbytes / whole < 0.05, (sealed.plan.whole.nbytes, whole)
        await generator.start()
        try:
            sizes = []
            for version in range(1, 41):
                learner.train(version)
                await publish(generator, learner.buckets(version))
                sizes.append(psutil.Process().memory_info().rss)
            # Rounding grows with the adapters, to which every version adds.
            assert gap(learner.model, await generator.generate(PROMPTS, KEYS, 3)) < 5 * FLOAT32
            # Thirty adapters that stayed would be about twenty times as much.
            assert sizes[-1] - sizes[9] < 1.5 * sealed.plan.whole.nbytes
        finally:
            await generator.stop()

    asyncio.run(run())


def test_a_damaged_tensor_leaves_the_old_adapters_and_sent_again_takes_effect(tmp_path):
    async def run():
        directory = make_tiny_llama(tmp_path / "model", VOCAB)
        learner, generator = Learner(directory), make_generator(directory)
        await generator.start()
        try:
            learner.train(1)
            buckets = learner.buckets(1)
            damaged = [array.copy() for array in buckets[1].arrays]
            damaged[0][5] ^= 1
            with pytest.raises(DamagedBucket, match=r"tensor 'base_model.model.model.layers.*lora_.* has digest"):
                await publish(generator, [buckets[0], replace(buckets[1], arrays=damaged), *buckets[2:]])
            assert gap(load_model(directory), await generator.generate(PROMPTS, KEYS, 3)) < FLOAT32
            for bucket in buckets[1:]:
                await generator.load_weights(bucket, 1)
            await generator.finish_weights(1)
            assert gap(learner.model, await generator.generate(PROMPTS, KEYS, 3)) < FLOAT32
            other = Learner(directory, LoRAConfig(rank=2))
            with pytest.raises(WeightsError, match=r"has shape \(2, 64\), the model's is \(4, 64\)"):
                await publish(generator, other.buckets(2))
            await publish(generator, learner.buckets(3))
            assert gap(learner.model, await generator.generate(PROMPTS, KEYS, 3)) < FLOAT32
        finally:
            await generator.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("engine", "in_flight"), [
    ("in_process", "keep"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("in_process", "abort"), ("async", "keep"), ("async", "abort")))])
def test_responses_in_flight_continue_with_the_new_adapters(engine, in_flight, tmp_path):
    async def run():
        directory = make_tiny_llama(tmp_path / "model", VOCAB, tied=False)
        learner, generator = Learner(directory), make_generator(directory, engine=engine, in_flight=in_flight)
        await generator.start()
        try:
            sampling = asyncio.create_task(generator.generate(PROMPTS, KEYS, 3, LONG))
            while generator.tokens_made() < 60:
                await asyncio.sleep(0.001)
            learner.train(1)
            await publish(generator, learner.buckets(1))
            return learner.model, load_model(directory), await sampling
        finally:
            await generator.stop()

    new, base, rollout = asyncio.run(run())
    for version, model in enumerate((base, new)):
        sampled = rollout.response_mask & (rollout.versions == version)
        assert sampled.sum() > 20 and gap(model, rollout, sampled) < FLOAT32


@pytest.mark.slow
def test_in_bfloat16_the_adapters_are_closer_to_the_learner_than_merged_weights(tmp_path):
    """The merged weights lose what is less than their last bit."""
    async def sampled(directory):
        learner, generator = Learner(directory, dtype="bfloat16"), make_generator(directory, dtype="bfloat16")
        learner.train(1)
        for name, parameter in learner.model.named_parameters():
            parameter.data *= 0.1 if ".lora_" in name else 1
        await generator.start()
        try:
            await publish(generator, learner.buckets(1))
            return learner.model, await generator.generate(PROMPTS, KEYS, 3)
        finally:
            await generator.stop()

    model, rollout = asyncio.run(sampled(make_tiny_llama(tmp_path / "model", VOCAB)))
    assert gap(model, rollout) < 0.3


def families():
    """Models of the families whose adapters are published alone, tied and untied where vLLM has both."""
    return [(name, tied) for name, (family, _) in MODELS.items() if family in ADAPTER_FAMILIES
            for tied in (True, False) if name not in (UNTIED if tied else TIED)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tied"), families())
def test_a_familys_log_probabilities_are_the_learners(name, tied, tmp_path):
    make_model(tmp_path, name, 1, torch.float32, tied)
    known = replace(PROMPTS, tokens=PROMPTS.tokens % (TOKENS - 2) + 2)
    seen = asyncio.run(run_versions(tmp_path, known))
    assert max(gap(model, rollout) for model, rollout in seen) < FLOAT32
    assert min(gap(older, rollout) for (older, _), (_, rollout) in pairwise(seen)) > 0.3
