"""`python -m benchmarks.float32_head`: how far log-probabilities of generator and learner are apart in bfloat16, with
logits in float32 (`model.float32_head`) on both sides, on one, and on none.

Random Llamas, small but for their vocabulary of 131,072 tokens. The head is scaled so that logits are spread as those
of language models are: a standard deviation of 4, the largest near 20, and an entropy of about 4 nats. How much the
layers before it round apart depends on their weights, so there are two models: one of weights as small as transformers
initialises them, whose layers change little, and one of larger weights. vLLM samples responses, and packed passes
compute the log-probabilities of the same tokens as learners do: in a model trained whole, whose weights are float32 and
its products bfloat16 (`autocast`), and in a frozen one in bfloat16, such as a reference or the base of adapters.
"""

import asyncio
import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.generator_parity import logprob_gap, typical_gap
from rlhf_ray.models.packing import Packing
from rlhf_ray.records import Prompts, Rollout, SampleKey, offsets_of

VOCABULARY, HIDDEN, LAYERS, HEADS = 131_072, 256, 4, 4
SPREAD = 4.0
"""Standard deviation of the logits."""
SCALES = 0.02, HIDDEN**-0.5
"""Standard deviation of the other weights."""
PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS = 64, 16, 32
KINDS = {"trained whole": "float32", "frozen": "bfloat16"}
"""Precision of a learner's weights."""


@dataclass(frozen=True)
class Gap:
    """Of log-probabilities of one rollout, in nats."""

    root_mean_square: float
    median: float
    quantile: float
    """99 of 100 tokens have a smaller one."""

    @classmethod
    def of(cls, one: NDArray[np.float32], other: NDArray[np.float32]) -> "Gap":
        """Between `[n]` log-probabilities."""
        return cls(logprob_gap(one, other), typical_gap(one, other), float(np.quantile(np.abs(one - other), 0.99)))


def make_model(directory: str, scale: float, vocabulary: int = VOCABULARY) -> None:
    """Save a random Llama in float32, and a tokenizer, which nobody reads texts with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_ray.data.tokenizer import train_tokenizer

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=256, tie_word_embeddings=False,
        initializer_range=scale, bos_token_id=None, eos_token_id=None, pad_token_id=None))
    torch.nn.init.normal_(model.lm_head.weight, std=SPREAD * HIDDEN**-0.5)
    model.save_pretrained(directory)
    train_tokenizer(["some words"], 300, Path(directory))


async def sampled(directory: str, head: bool, vocabulary: int = VOCABULARY) -> Rollout:
    """Responses of a generator in bfloat16."""
    from rlhf_ray.roles.generator import Generator

    context = PROMPT_TOKENS + RESPONSE_TOKENS
    settings = GenerationConfig(max_sequences=PROMPTS, kv_cache_mb=256, threads=len(os.sched_getaffinity(0)),
                                sampling=SamplingConfig(max_tokens=RESPONSE_TOKENS))
    generator = Generator(ModelConfig(path=directory, dtype="bfloat16", float32_head=head), settings, 0, context)
    tokens = np.random.default_rng(0).integers(300, vocabulary, PROMPTS * PROMPT_TOKENS).astype(np.int32)
    prompts = Prompts(offsets_of([PROMPT_TOKENS] * PROMPTS), tokens, [""] * PROMPTS, [{} for _ in range(PROMPTS)],
                      np.arange(PROMPTS))
    await generator.start()
    try:
        return await generator.generate(prompts, [SampleKey(0, row, 0) for row in range(PROMPTS)], 0)
    finally:
        await generator.stop()


@torch.no_grad()
def learned(directory: str, kind: str, head: bool, rollout: Rollout) -> NDArray[np.float32]:
    """[n] log-probabilities of the responses' tokens, as a learner computes them."""
    from rlhf_ray.models.loading import load_causal_lm
    from rlhf_ray.models.packed_model import PackedLanguageModel

    precision = KINDS[kind]
    module = PackedLanguageModel(load_causal_lm(ModelConfig(path=directory, dtype=precision, float32_head=head)))
    predicted = torch.from_numpy(rollout.response_mask.nonzero()[0])
    tokens, packing = torch.from_numpy(rollout.tokens.astype(np.int64)), Packing.of(rollout.lengths)
    with torch.autocast("cpu", torch.bfloat16) if precision == "float32" else nullcontext():
        found = module(tokens, packing, predicted)[0].numpy()
    return np.asarray(found, np.float32)


def measured(directory: str, vocabulary: int = VOCABULARY) -> dict[tuple[str, bool, bool], Gap]:
    """Gaps by the learner's kind, and whether logits are float32 in generator and learner."""
    gaps = {}
    for at_generator in (False, True):
        rollout = asyncio.run(sampled(directory, at_generator, vocabulary))
        theirs = rollout.logprobs[rollout.response_mask]
        for kind, at_learner in product(KINDS, (False, True)):
            gaps[kind, at_generator, at_learner] = Gap.of(learned(directory, kind, at_learner, rollout), theirs)
    return gaps


def main() -> None:
    """Print a table."""
    print("| weights | learner's model | generator's logits | learner's logits | root mean square | median | 99 % |")
    print("|---:|---|---|---|---:|---:|---:|")
    for scale in SCALES:
        with tempfile.TemporaryDirectory() as directory:
            make_model(directory, scale)
            gaps = measured(directory)
        for key in sorted(gaps, reverse=True):
            print(row(scale, key, gaps[key]), flush=True)


def row(scale: float, key: tuple[str, bool, bool], gap: Gap) -> str:
    """A line of the table."""
    kind, *heads = key
    generator, learner = ("float32" if head else "bfloat16" for head in heads)
    return (f"| {scale:.3f} | {kind} | {generator} | {learner} | {gap.root_mean_square:.4f} | {gap.median:.4f} | "
            f"{gap.quantile:.4f} |")


if __name__ == "__main__":
    main()
