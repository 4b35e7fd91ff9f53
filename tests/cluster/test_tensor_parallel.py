"""A generator whose model is shared out over two processes: the same samples, and whole weights into both."""

import asyncio

import pytest
import torch

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.roles.generator import Generator
from tests.cluster.generators import CONTEXT, KEYS, PROMPTS, SHORT, VOCAB, assert_same, gap, load_model, publish
from tests.models import make_tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def generator_of(directory, tensor_parallel):
    settings = GenerationConfig(engine="async", max_sequences=8, kv_cache_mb=32, sampling=SHORT,
                                tensor_parallel=tensor_parallel)
    return Generator(ModelConfig(path=str(directory)), settings, seed=0, max_context=CONTEXT)


async def drawn(directory, tensor_parallel, model):
    """Samples before and after a publication of `model`."""
    generator = generator_of(directory, tensor_parallel)
    try:
        await generator.start()
        before = await generator.generate(PROMPTS, KEYS, 3)
        files = []
        for version in (1, 2):
            await publish(generator, model, version)
            files.append([file.inode for file in generator._engine._kept])
        assert files[0] == files[1] != [], "no process maps a bucket once it is loaded"
        return before, await generator.generate(PROMPTS, KEYS, 3)
    finally:
        await generator.stop()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_processes_draw_what_one_draws(tmp_path, tied):
    directory = make_tiny_llama(tmp_path / "m", vocab=VOCAB, hidden=64, heads=2, tied=tied)
    changed = load_model(directory)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    alone = asyncio.run(drawn(directory, 1, changed))
    shared = asyncio.run(drawn(directory, 2, changed))
    for one, two in zip(alone, shared, strict=True):
        assert_same(one, two)
    assert gap(load_model(directory), shared[0]) < 1e-3
    assert gap(changed, shared[1]) < 1e-3 < gap(load_model(directory), shared[1])
