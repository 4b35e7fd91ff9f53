"""`python -m benchmarks.sample_files`: the size of a step's samples, and how long an assembler takes to write them.

Tokens are drawn by Zipf's law, as words are; log-probabilities are random, so they compress worse than a model's.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import numpy as np

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.records import Experience, ExperienceSummary, Prompts, SampleKey, offsets_of
from rlhf_ray.roles.assembler import Assembler
from tests.models import make_tiny_llama

VOCABULARY, PER_PROMPT = 30_000, 8


def step_of(samples: int, prompt: int, response: int) -> tuple[Experience, ExperienceSummary, Prompts]:
    """A step of random samples."""
    random, tokens = np.random.default_rng(0), samples * (prompt + response)
    mask = np.tile(np.repeat([False, True], [prompt, response]), samples)
    frequencies = 1 / np.arange(1, VOCABULARY)
    ids = random.choice(np.arange(1, VOCABULARY), tokens, p=frequencies / frequencies.sum()).astype(np.int32)

    def column(values: np.ndarray) -> np.ndarray:
        return np.where(mask, values, 0).astype(np.float32)

    def scores() -> np.ndarray:
        return random.random(samples).astype(np.float32)

    behaviour = column(-random.exponential(1, tokens))
    advantages = column(np.repeat(random.normal(size=samples), prompt + response))
    experience = Experience(
        offsets_of([prompt + response] * samples), ids, mask, behaviour_logprobs=behaviour,
        old_logprobs=column(behaviour + random.normal(0, 1e-3, tokens)),
        reference_logprobs=column(behaviour + random.normal(0, 0.05, tokens)), values=None,
        advantages=advantages, returns=advantages,
        keys=[SampleKey(0, *divmod(i, PER_PROMPT)) for i in range(samples)],
        versions=np.where(mask, 3, -1).astype(np.int32), finish_reasons=["stop"] * samples)
    summary = ExperienceSummary(
        scores=scores(), kl=scores(), response_lengths=np.full(samples, response, np.int32),
        finished=np.ones(samples, bool), min_version=3, nbytes=experience.nbytes, tokens=tokens, behaviour_gap=0.0,
        gap_histogram=np.ones(1, np.float32), gold=None, components={"main": scores()})
    rows = samples // PER_PROMPT
    prompts = Prompts(offsets_of([1] * rows), np.zeros(rows, np.int32), [""] * rows, [{}] * rows, np.arange(rows))
    return experience, summary, prompts


def main() -> None:
    """Write two steps; the first decodes every token of the vocabulary that occurs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sample_files", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=1024, help="tokens of a response")
    asked = parser.parse_args()
    experience, summary, prompts = step_of(asked.samples, asked.prompt, asked.response)
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory) / "model", vocab=VOCABULARY, hidden=32, heads=1)
        assembler = Assembler(AlgorithmConfig(), ModelConfig(path=str(model)), asked.response)
        assembler.start()
        for step in (1, 2):
            size, seconds = asyncio.run(assembler.save_samples(
                str(Path(directory) / "samples"), None, step, None, True, [summary], prompts, [experience]))
            print(f"step {step}: {size / 1e6:.1f} MB, {size / asked.samples / 1e3:.1f} kB a sample, "
                  f"{size / len(experience.tokens):.1f} bytes a token, {seconds:.2f} s")


if __name__ == "__main__":
    main()
