"""`python -m benchmarks.lora_memory`: what adapters save, on a random Llama of 74 million parameters.

Each way of holding policy and reference runs in processes of its own, which make one update and save: parameters
trained, resident memory beyond what the process had before it built anything, and the size of the checkpoint.
"""

import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import LoRAConfig, PolicyConfig
from rlhf_ray.config.model import DType, ModelConfig
from rlhf_ray.records import Experience, SampleKey, offsets_of

VOCABULARY, ROWS, LENGTH = 16_384, 8, 64
MIB = 2**20


@dataclass(frozen=True)
class Way:
    """One way to hold policy and reference."""

    name: str
    lora: LoRAConfig | None
    dtype: DType = "float32"


WAYS = (Way("whole model", None), Way("LoRA, float32 base", LoRAConfig()),
        Way("LoRA, bfloat16 base", LoRAConfig(), "bfloat16"))


@dataclass(frozen=True)
class Footprint:
    """What a way took; MiB where it is not a count."""

    trained: int
    learner: float
    """Highest resident memory of the policy learner."""
    reference: float
    """Highest resident memory of a reference of its own; 0 where the policy carries it."""
    checkpoint: float


def make_model(directory: Path) -> None:
    """Save a random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2304, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )).save_pretrained(directory)


def experience() -> Experience:
    """Random rows, the second half of each a response."""
    random, tokens = np.random.default_rng(0), ROWS * LENGTH
    mask = np.tile(np.arange(LENGTH) >= LENGTH // 2, ROWS)
    column = np.where(mask, -1, 0).astype(np.float32)
    return Experience(offsets_of([LENGTH] * ROWS), random.integers(2, VOCABULARY, tokens).astype(np.int32), mask,
                      column, column, column, None, column, column, [SampleKey(0, i, 0) for i in range(ROWS)])


def resident(kind: str = "VmHWM") -> float:
    """Resident memory of this process: the highest so far, or with VmRSS the present one."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{kind}:")[2].split()[0]) / 1024


def learn(model: Path, way: Way, directory: Path) -> tuple[int, float]:
    """Start a policy learner, make an update, save; returns parameters trained and memory taken."""
    import deepspeed  # noqa: F401  (counted to the process, as peft is, and not to the model)
    import peft  # noqa: F401

    from rlhf_ray.engine.distributed import free_address
    from rlhf_ray.roles.policy_learner import PolicyLearner

    before = resident("VmRSS")
    learner = PolicyLearner(PolicyConfig(micro_batch_tokens=LENGTH * 2, lora=way.lora),
                            ModelConfig(path=str(model), dtype=way.dtype), rank=0, world=1, seed=0, total_steps=10,
                            algorithm=AlgorithmConfig(epochs=1, mini_batches=1), temperature=1.0)
    sizes = learner.start(free_address("127.0.0.1"), timeout_s=600.0)
    learner.update(0, 0.0, experience())
    highest = resident() - before
    learner.begin_save(str(directory))
    while not learner.save_progress().done:
        time.sleep(0.01)
    return int(sizes["trained"]), highest


def refer(model: Path) -> float:
    """Start a reference scorer; returns memory taken."""
    from rlhf_ray.models.loading import load_causal_lm

    before = resident("VmRSS")
    held = load_causal_lm(ModelConfig(path=str(model)))
    for parameter in held.parameters():
        parameter.sum()  # weights mapped from a file are resident once they are read
    return resident() - before


def measure(model: Path, way: Way, directory: Path) -> Footprint:
    """Each part in a new process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        trained, learner = pool.apply(learn, (model, way, directory))
    with context.Pool(1) as pool:
        reference = 0.0 if way.lora else pool.apply(refer, (model,))
    written = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return Footprint(trained, learner, reference, written / MIB)


def main() -> None:
    """Measure all ways and print a table."""
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        print(f"{'':22}{'trained':>12}{'learner MiB':>13}{'reference MiB':>15}{'checkpoint MiB':>16}")
        for way in WAYS:
            found = measure(Path(folder) / "model", way, Path(folder) / way.name.replace(" ", "_"))
            print(f"{way.name:22}{found.trained:>12,}{found.learner:>13.0f}{found.reference:>15.0f}"
                  f"{found.checkpoint:>16.1f}")


if __name__ == "__main__":
    main()
