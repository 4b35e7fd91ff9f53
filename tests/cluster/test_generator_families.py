"""Log-probabilities of tokens sampled by the real vLLM, before and after a publication, held against transformers'
forward pass of the same weights: every family that is listed as working, tied and untied, in float32 and bfloat16."""

import asyncio
import copy

import numpy as np
import pytest
import torch

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.model_families import FAMILIES, Use
from rlhf_ray.records import Prompts, SampleKey, offsets_of
from rlhf_ray.roles.generator import Generator
from rlhf_ray.weights.publication import SealedBuckets
from tests.cluster.generator_families import MODELS, TIED, UNTIED, VOCAB, make_model

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 6
CONTEXT = 96
KEYS = [SampleKey(0, row, 0) for row in range(ROWS)]
CASES = [*((name, "float32", False) for name in MODELS if name not in TIED),
         *((name, "float32", True) for name in MODELS if name not in UNTIED),
         *((name, "bfloat16", name in TIED) for name in MODELS)]
QUICK = [("mixtral", "float32", False)]
"""In the default suite, which has a dense family in `test_generator.py`."""


def prompts():
    rng = np.random.default_rng(5)
    lengths = rng.integers(3, 40, ROWS)
    tokens = rng.integers(2, VOCAB, lengths.sum()).astype(np.int32)
    return Prompts(offsets_of(lengths), tokens, [""] * ROWS, [{} for _ in range(ROWS)], np.arange(ROWS))


@torch.no_grad()
def logprobs(model, rollout):
    """[n] log-probabilities of the response tokens by transformers' own forward pass, a row at a time."""
    rows = []
    for i in range(len(rollout)):
        tokens = torch.from_numpy(rollout.row(i, "tokens").astype(np.int64))
        scores = model(tokens[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        rows.append(np.append(0.0, scores.gather(1, tokens[1:, None])[:, 0].numpy()))
    return np.concatenate(rows)[rollout.response_mask]


def assert_right(model, rollout):
    """In bfloat16 the generator is as far from a float32 pass of the same weights as transformers in bfloat16 is."""
    sampled, exact = rollout.logprobs[rollout.response_mask], logprobs(copy.deepcopy(model).float(), rollout)
    if model.dtype is torch.float32:
        np.testing.assert_allclose(sampled, exact, atol=1e-4)
    else:
        assert np.abs(sampled - exact).mean() < 2 * np.abs(logprobs(model, rollout) - exact).mean()


async def sampled_before_and_after(directory, dtype, other):
    """Rollouts under the weights in `directory`, and under those of the model `other`, published in many buckets."""
    generator = Generator(ModelConfig(path=str(directory), dtype=dtype), GenerationConfig(
        engine="in_process", max_sequences=8, kv_cache_mb=32, sampling=SamplingConfig(max_tokens=24)), 0, CONTEXT)
    await generator.start()
    try:
        before = await generator.generate(prompts(), KEYS, 3)
        tensors = dict(other.named_parameters())
        specs = [(name, tuple(tensor.shape), dtype) for name, tensor in tensors.items()]
        sealed = SealedBuckets(specs, tensors, 100_000, lambda names: {name: tensors[name] for name in names})
        await generator.begin_weights(1, 1, sealed.plan.whole.buckets)
        for index in range(sealed.plan.whole.buckets):
            await generator.load_weights(sealed.bucket(1, index), 1)
        await generator.finish_weights(1)
        return before, await generator.generate(prompts(), KEYS, 3)
    finally:
        await generator.stop()


@pytest.mark.parametrize(("name", "dtype", "tied"), [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES])
def test_sampled_tokens_have_transformers_log_probabilities(name, dtype, tied, tmp_path):
    old, new = (make_model(tmp_path / str(seed), name, seed, getattr(torch, dtype), tied) for seed in (1, 2))
    before, after = asyncio.run(sampled_before_and_after(tmp_path / "1", dtype, new))
    assert_right(old, before)
    assert_right(new, after)
    assert np.abs(logprobs(new, before) - logprobs(old, before)).mean() > 0.3, "the publication changes something"


def test_every_family_listed_as_working_is_tested_here():
    listed = {name for name, family in FAMILIES.items() if {Use.GENERATION, Use.PUBLICATION} <= family.supported}
    assert listed == {family for family, _ in MODELS.values()}
