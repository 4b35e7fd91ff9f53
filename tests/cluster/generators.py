"""Generators for tests of the real vLLM, the models they hold, and the forward passes of the same weights."""

from __future__ import annotations

import numpy as np
import torch

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.records import Prompts, SampleKey, offsets_of
from rlhf_ray.roles.generator import Generator
from rlhf_ray.weights.publication import SealedBuckets

VOCAB = 512
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EOS = 1
TURN_END = 9
"""A second token that ends responses: the model names this one, the tokenizer EOS, as with some chat models."""
CONTEXT = 96
ROWS = 12
KEYS = [SampleKey(0, row, 0) for row in range(ROWS)]
MANY = [SampleKey(0, row, sample) for row in range(ROWS) for sample in range(4)]
SHORT = SamplingConfig(max_tokens=16)
LONG = SamplingConfig(max_tokens=80)


def make_prompts():
    """ROWS prompts of 3 to 14 random tokens."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(3, 15, ROWS)
    tokens = rng.integers(2, VOCAB, lengths.sum()).astype(np.int32)
    return Prompts(offsets_of(lengths), tokens, [""] * ROWS, [{} for _ in range(ROWS)], np.arange(ROWS))


PROMPTS = make_prompts()


def make_generator(directory, engine="in_process", in_flight="keep", sampling=SHORT, **vllm):
    """A generator that records sampling masks, not started."""
    settings = GenerationConfig(engine=engine, max_sequences=8, kv_cache_mb=16, sampling=sampling, vllm=vllm)
    return Generator(ModelConfig(path=str(directory)), settings, seed=0, max_context=CONTEXT, in_flight=in_flight,
                     record_masks=True)


def load_model(directory):
    """The Hugging Face model in `directory`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).eval()


def buckets_of(model, version, bucket_bytes=100_000):
    """A whole publication of the model's weights, in several buckets."""
    named = dict(model.named_parameters())
    sealed = sealed_buckets_of(model, named, bucket_bytes)
    assert sealed.plan.whole.buckets > 2
    return [sealed.bucket(version, i) for i in range(sealed.plan.whole.buckets)]


def sealed_buckets_of(model, changing, bucket_bytes=100_000):
    """Publishes the model's weights; `changing` are the names of those that change."""
    named = dict(model.named_parameters())
    specs = [(n, tuple(p.shape), "float32") for n, p in named.items()]
    return SealedBuckets(specs, changing, bucket_bytes, lambda names: {n: named[n] for n in names})


async def publish(generator, model, version, **options):
    """Send all buckets and finish."""
    buckets = buckets_of(model, version)
    await generator.begin_weights(version, version, len(buckets), **options)
    for bucket in buckets:
        await generator.load_weights(bucket, version)
    confirmed = await generator.finish_weights(version)
    assert confirmed.version == version and confirmed.pause_seconds > 0


@torch.no_grad()
def reference_logprobs(model, rollout, temperature=1.0):
    """Log-probabilities of every token given those before it; 0 for each row's first."""
    rows = []
    for i in range(len(rollout)):
        tokens = torch.from_numpy(rollout.row(i, "tokens").astype(np.int64))
        logits = model(tokens[None]).logits[0, :-1] / temperature
        rows.append(np.append(0.0, torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0].numpy()))
    return np.concatenate(rows)


def gap(model, rollout, where=None, temperature=1.0):
    """Largest difference between the rollout's and the reference's log-probabilities on `where` (default: response)."""
    where = rollout.response_mask if where is None else where
    return np.abs(reference_logprobs(model, rollout, temperature) - rollout.logprobs)[where].max()


def assert_same(rollout, other):
    """Same tokens and, to float32's accuracy, same log-probabilities."""
    assert np.array_equal(rollout.tokens, other.tokens) and np.array_equal(rollout.seeds, other.seeds)
    assert np.allclose(rollout.logprobs, other.logprobs, atol=1e-5)


async def alone(generator, keys):
    """One call per key, one after the other, as one rollout."""
    parts = [await generator.generate(PROMPTS, [key], 3) for key in keys]
    return type(parts[0]).concat(parts)
