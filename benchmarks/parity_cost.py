"""`python -m benchmarks.parity_cost`: what it takes at a start to compare packed passes with transformers' own.

Two random Llamas: a tiny one, whose rows have up to 192 tokens, and one of 100 million parameters, with rows of up to
1,024; as a learner compares them, with gradients, and as a scorer does. CPU seconds of one thread in float32, which
other work on the machine changes little, beside those of one update's forward and backward pass over as many tokens as
a micro-batch holds.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlhf_ray.models.attention import register
from rlhf_ray.models.cpu.linear import use_onednn
from rlhf_ray.models.packed_model import PackedLanguageModel
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.parity import ParityProbe, RowLimits

BUDGET = 4096
SHAPES: dict[str, tuple[int, dict[str, int]]] = {
    "tiny": (192, {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
                   "num_attention_heads": 4, "num_key_value_heads": 4}),
    "100 million": (1024, {"vocab_size": 32_000, "hidden_size": 640, "intermediate_size": 1792,
                           "num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 10}),
}


def make_module(shape: dict[str, int]) -> PackedLanguageModel:
    """A random Llama as learners run it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=2048, tie_word_embeddings=False))
    model.set_attn_implementation(register())
    return PackedLanguageModel(use_onednn(model))


def micro_batch(module: PackedLanguageModel, longest: int) -> None:
    """A forward and a backward pass over `BUDGET` tokens in rows of the longest, as an update makes them."""
    packing = Packing.of(np.full(BUDGET // longest, longest))
    tokens = torch.arange(packing.tokens) % module.model.config.vocab_size
    module(tokens, packing, packing.positions.nonzero()[:, 0])[0].sum().backward()
    module.zero_grad()


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print("| model | parameters | longest row | learner (s) | scorer (s) | one micro-batch of 4,096 tokens (s) |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (longest, shape) in SHAPES.items():
        print(row(name, longest, make_module(shape)), flush=True)


def row(name: str, longest: int, module: PackedLanguageModel) -> str:
    """A model's line of the table."""
    micro_batch(module, longest)  # oneDNN writes its code
    limits, size = RowLimits(longest, BUDGET), sum(p.numel() for p in module.parameters())
    learner = cpu_seconds(lambda: ParityProbe(module, limits, "cpu", gradients=True).check(name))
    scorer = cpu_seconds(lambda: ParityProbe(module, limits, "cpu").check(name))
    update = cpu_seconds(lambda: micro_batch(module, longest))
    return f"| {name} | {size:,} | {longest:,} | {learner:.2f} | {scorer:.2f} | {update:.2f} |"


if __name__ == "__main__":
    main()
