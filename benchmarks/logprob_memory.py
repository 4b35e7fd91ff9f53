"""`python -m benchmarks.logprob_memory`: memory of log-probabilities at a large vocabulary, in chunks and all at once.

A small model with a vocabulary of 131,072 tokens answers for 2,048 of them, and its gradients are taken: in float32
the logits alone are a GiB. Each way runs in a separate process, which says how far its resident memory rose over what
it had before, how long it took, and what came out.
"""

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlhf_ray.models.packed_model import Chunks, PackedLanguageModel
from rlhf_ray.models.packing import Packing

VOCABULARY, ROWS, LENGTH = 131_072, 16, 129
WAYS = {"all at once": Chunks(elements=VOCABULARY * ROWS * LENGTH), "in chunks": Chunks()}


@dataclass(frozen=True)
class Pass:
    """What one way took."""

    rise_mib: float
    """Highest resident memory over that before the pass."""
    seconds: float
    logprob: float
    """Mean."""
    gradient: float
    """Norm over all parameters; 0 without gradients."""


def make_model() -> "torch.nn.Module":
    """A random Llama, small but for its vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_ray.models.attention import register
    from rlhf_ray.models.cpu.linear import use_onednn

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    ))
    model.set_attn_implementation(register())
    return use_onednn(model)


def resident(kind: str) -> float:
    """MiB of this process's memory: VmRSS at present, VmHWM at most so far."""
    return int(Path("/proc/self/status").read_text().partition(f"{kind}:")[2].split()[0]) / 1024


def answer(chunks: Chunks, graph: bool) -> Pass:
    """One pass over all rows, with or without gradients."""
    torch.set_num_threads(1)
    model = PackedLanguageModel(make_model(), chunks=chunks)
    tokens = torch.randint(VOCABULARY, (ROWS * LENGTH,), generator=torch.Generator().manual_seed(0))
    predicted = torch.arange(ROWS * LENGTH)[torch.arange(ROWS * LENGTH) % LENGTH > 0]
    before, began = resident("VmRSS"), time.perf_counter()
    with torch.set_grad_enabled(graph):
        logprobs, _ = model(tokens, Packing.of(np.full(ROWS, LENGTH)), predicted)
    if graph:
        logprobs.mean().backward()
    seconds = time.perf_counter() - began
    gradient = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return Pass(resident("VmHWM") - before, seconds, float(logprobs.detach().mean()), float(gradient))


def main() -> None:
    """Measure all ways and print a table."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    context = multiprocessing.get_context("spawn")
    print(f"{'':32}{'MiB':>8}{'s':>8}{'mean log-probability':>24}{'gradient norm':>18}")
    for graph in (False, True):
        for name, chunks in WAYS.items():
            with context.Pool(1) as pool:
                found = pool.apply(answer, (chunks, graph))
            print(f"{'with gradients' if graph else 'without':16}{name:16}{found.rise_mib:>8,.0f}{found.seconds:>8.2f}"
                  f"{found.logprob:>24.7f}{found.gradient:>18.7f}")


if __name__ == "__main__":
    main()
