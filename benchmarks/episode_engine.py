"""Episodes of eight turns beside the engine alone: one runner, real environments, one real vLLM, in one process.

`python -m benchmarks.episode_engine MODEL on|off OUT` gives the numbers of one engine, with a prefix cache or without.
The runner calls the generator directly: what Ray adds to a call is in `coordinator_scale`.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.episode_world import TURNS
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.encoding import flat_tokens
from rlhf_ray.records import Prompts, SampleKey, offsets_of
from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.roles.generator import Generator
from rlhf_ray.weights.publication import SealedBuckets
from tests.chat_templates import make_chat_tokenizer
from tests.models import make_tiny_llama

BLOCK = 128
"""Tokens of a block of vLLM's cache on CPUs."""
VOCAB, CONTEXT = 448, 2048
SAMPLED = 64
"""Tokens of a turn at least: a stop token follows soon."""
STOPS = list(range(30, 130))
PROMPT = "please count the words of each answer, and say what you think of them. " * 6
"""About 200 tokens: with eight turns, histories of nine blocks."""
EPISODES = 8
"""Side by side."""
BUCKET_BYTES = 16 << 20
ALONE = 3
"""Episodes one after the other, for the time of a turn."""
WORLD = Path(__file__).with_name("episode_world.py")


class RecordingGenerator:
    """The generator, called directly; keeps what was asked and answered, with the time of each call."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.calls: list[tuple[SampleRequest, Completion, float]] = []
        self.episodes: dict[Any, list[tuple[SampleRequest, Completion]]] = {}
        """By what the runner calls an attempt."""

    def forget(self) -> None:
        """Forget what was asked so far."""
        self.calls = []
        self.episodes = {}

    async def call(self, method: Any, *args: Any, work: int = 1, sticky: Hashable = None, **named: Any
                   ) -> list[Completion]:
        """As `episode_runner.Generators.call`, of `Generator.sample`."""
        requests: list[SampleRequest] = args[0]
        began = time.perf_counter()
        completions = await self._generator.sample(requests)
        seconds = time.perf_counter() - began
        self.calls += [(request, completion, seconds)
                       for request, completion in zip(requests, completions, strict=True)]
        self.episodes.setdefault(sticky, []).extend(zip(requests, completions, strict=True))
        return completions


def make_model(directory: Path) -> Path:
    """A small model with a chat template."""
    model = make_tiny_llama(directory, VOCAB, hidden=256, layers=6, heads=4, positions=CONTEXT)
    make_chat_tokenizer(model, "qwen2.5")
    return model


async def measure(model: Path, cached: bool, repeats: int) -> dict[str, Any]:
    """All numbers of one engine; each list has one a repeat."""
    sampling = SamplingConfig(max_tokens=2 * SAMPLED, min_tokens=SAMPLED, stop_token_ids=STOPS)
    generation = GenerationConfig(engine="in_process", max_sequences=EPISODES, kv_cache_mb=256, threads=1,
                                  sampling=sampling, vllm={"enable_prefix_caching": cached})
    config = ModelConfig(path=str(model))
    generator = Generator(config, generation, 0, CONTEXT)
    await generator.start()
    recording = RecordingGenerator(generator)
    environments = {"talk": EnvironmentConfig(path=f"{WORLD}:Talk", max_turns=TURNS + 1, max_tokens=CONTEXT,
                                              concurrency=EPISODES)}
    runner = EpisodeRunner(environments, config, sampling, recording)
    await runner.start()
    try:
        turns = [await turn(runner, recording, number) for number in range(repeats + 1)]
        rates = [await rate(runner, recording, number) for number in range(repeats + 1)]
        found: dict[str, Any] = {"turn": turns[1:], "rate": rates[1:]}
        if cached:
            weights = weights_of(model)
            published = [await publication(generator, recording, weights, number) for number in range(repeats + 1)]
            found["publication"] = published[1:]
    finally:
        await runner.stop()
        await generator.stop()
    return found


async def turn(runner: EpisodeRunner, recording: RecordingGenerator, number: int) -> dict[str, float]:
    """Seconds of a turn of episodes one after the other, and of the engine alone for the same requests, in the same
    order; both begin with a cache that has none of them."""
    recording.forget()
    began = time.perf_counter()
    for i in range(ALONE):
        await play(runner, 1, ALONE * number + i, epoch=0)
    episode_s = time.perf_counter() - began
    calls = list(recording.calls)
    within_s = sum(seconds for _, _, seconds in calls)
    # The engine again, with prompts that it has not seen: their first block differs.
    began = time.perf_counter()
    for request, completion, _ in calls:
        prompt = [*request.prompt]
        prompt[0] = 2 + (prompt[0] + 7) % 20
        await recording.call(None, [exactly(request, prompt, len(completion.tokens))])
    return {"episode_ms": 1e3 * episode_s / len(calls), "engine_ms": 1e3 * (time.perf_counter() - began) / len(calls),
            "within_ms": 1e3 * within_s / len(calls), "turns": len(calls)}


async def rate(runner: EpisodeRunner, recording: RecordingGenerator, number: int) -> dict[str, float]:
    """Sampled tokens a second of episodes side by side, and of single responses that sample and read as many tokens:
    what the environment said in all turns is in their prompts."""
    recording.forget()
    began = time.perf_counter()
    await play(runner, EPISODES, 1000 + EPISODES * number, epoch=1)
    episodes_s = time.perf_counter() - began
    calls = list(recording.calls)
    episodes = list(recording.episodes.values())
    singles = [single(turns) for turns in episodes]
    assert len(singles) == EPISODES
    tokens = sum(len(completion.tokens) for _, completion, _ in calls)
    began = time.perf_counter()
    await asyncio.gather(*(recording.call(None, [each]) for each in singles))
    single_s = time.perf_counter() - began
    read = sum(len(request.prompt) for request, _, _ in calls)
    return {"episodes": tokens / episodes_s, "single": tokens / single_s, "sampled": tokens, "read": read,
            "computed_with_cache": sum(map(computed, episodes)),
            "read_again_without_cache": read - sum(len(each.prompt) for each in singles),
            "waiting_for_the_engine": sum(seconds for _, _, seconds in calls) / (EPISODES * episodes_s),
            "longest": max(len(request.prompt) + len(completion.tokens) for request, completion, _ in calls)}


def single(turns: Sequence[tuple[SampleRequest, Completion]]) -> SampleRequest:
    """A request that samples as many tokens as all turns, after as many as they read, none of which is cached."""
    request, completion = turns[-1]
    sampled = sum(len(one.tokens) for _, one in turns)
    read = len(request.prompt) + len(completion.tokens) - sampled
    return exactly(request, request.prompt[:read][::-1], sampled)


def computed(turns: Sequence[tuple[SampleRequest, Completion]]) -> int:
    """Tokens of an episode's contexts that are in no whole block of an earlier turn."""
    total = held = 0
    for request, completion in turns:
        total += len(request.prompt) - held
        held = (len(request.prompt) + len(completion.tokens) - 1) // BLOCK * BLOCK
    return total


async def publication(
    generator: Generator, recording: RecordingGenerator, weights: SealedBuckets, number: int
) -> dict[str, float]:
    """What a publication costs open episodes, which are at all turns: their next turn's first token with the cache
    that they had, the publication, and the same after it."""
    rng = np.random.default_rng(number)
    contexts = [rng.integers(130, VOCAB - 10, 220 + 130 * turn).tolist() for turn in range(EPISODES)]
    requests = [SampleRequest(context, SamplingConfig(max_tokens=1), 1, 0, []) for context in contexts]
    seconds = []
    for step in ("fill", "warm", "publish", "cold"):
        began = time.perf_counter()
        if step == "publish":
            await publish(generator, weights, number + 1)
        else:
            await asyncio.gather(*(recording.call(None, [request]) for request in requests))
        seconds.append(time.perf_counter() - began)
    fill_s, warm_s, publish_s, cold_s = seconds
    tokens = sum(len(context) // BLOCK * BLOCK for context in contexts)
    times = {"first_ms": fill_s, "warm_ms": warm_s, "publication_ms": publish_s, "cold_ms": cold_s,
             "prefill_ms": cold_s - warm_s}
    return {"tokens": tokens, "episodes": len(contexts), **{name: 1e3 * each for name, each in times.items()}}


def weights_of(model: Path) -> SealedBuckets:
    """The model's own weights, as a learner seals them."""
    named = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    specs = [(name, tuple(each.shape), "float32") for name, each in named.items()]
    return SealedBuckets(specs, list(named), BUCKET_BYTES, lambda names: {name: named[name] for name in names})


async def publish(generator: Generator, weights: SealedBuckets, version: int) -> None:
    """As a learner and the coordinator do it, without Ray."""
    count = weights.plan.whole.buckets
    await generator.begin_weights(version, version, count)
    for index in range(count):
        bucket = weights.bucket(version, index)
        assert bucket is not None
        await generator.load_weights(bucket, version)
    await generator.finish_weights(version)


async def play(runner: EpisodeRunner, episodes: int, first: int, epoch: int) -> None:
    """Episodes with prompts of their own, so that none finds another's blocks."""
    texts = [f"{number * 7919 % 10007} {PROMPT}" for number in range(first, first + episodes)]
    prompts = Prompts(offsets_of([1] * episodes), flat_tokens([[2]] * episodes), texts, [{}] * episodes,
                      np.arange(episodes), messages=None)
    rollout = await runner.play(prompts, [SampleKey(epoch, row, 0) for row in range(episodes)], first)
    causes = {episode.cause for episode in rollout.episodes or []}
    assert causes == {"completed"}, causes


def exactly(request: SampleRequest, prompt: Sequence[int], tokens: int) -> SampleRequest:
    """A request for exactly so many tokens."""
    sampling = request.sampling.model_copy(update={"max_tokens": tokens, "min_tokens": tokens})
    return SampleRequest(list(prompt), sampling, tokens, request.seed, request.stop_tokens)


def main() -> None:
    """Write the numbers of one engine."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episode_engine", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("cache", choices=("on", "off"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    found = asyncio.run(measure(asked.model, asked.cache == "on", asked.repeats))
    asked.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
