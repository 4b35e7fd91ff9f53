"""`PolicyLearner` alone in its process, on a model of random weights that no file holds, and rows to train it on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.runner import Place
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.generation import BUCKET_FROM_GPU_MB
from rlhf_ray.config.learner import OptimizerConfig, PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.engine.distributed import free_address
from rlhf_ray.models.packed_model import Chunks, PackedLanguageModel
from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.learner_memory import Training, learner_memory
from rlhf_ray.planning.local_machine import as_hardware, gpus_here
from rlhf_ray.planning.memory_breakdown import Memory
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.records import Experience, Rollout, SampleKey, offsets_of
from rlhf_ray.roles.policy_learner import PolicyLearner

SEED, TIMEOUT_S = 0, 120.0
ALGORITHM = AlgorithmConfig(epochs=1, mini_batches=1, estimator={"type": "gae", "whiten": False})
"""One optimizer step over all rows."""
BUCKET = BUCKET_FROM_GPU_MB << 20
"""Bytes of a publication's bucket."""


@dataclass(frozen=True)
class Size:
    """A Llama, and the rows of one update."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 128_256
    tied: bool = True
    rows: int = 32
    length: int = 1024
    prompt: int = 128
    """Tokens of a row's prompt; the others are its response."""
    micro_batch: int = 8192
    """Tokens."""

    def entries(self) -> dict[str, Any]:
        """Of a config.json."""
        return {"model_type": "llama", "hidden_size": self.hidden, "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
                "intermediate_size": self.intermediate, "vocab_size": self.vocabulary,
                "max_position_embeddings": self.length, "tie_word_embeddings": self.tied, "bos_token_id": 0,
                "eos_token_id": 1, "pad_token_id": 1, "initializer_range": 0.02}

    @property
    def predicted(self) -> int:
        """Tokens of all responses."""
        return self.rows * (self.length - self.prompt)


B1 = Size(2048, 16, 32, 8, 8192)
B3 = Size(3072, 28, 24, 8, 8192)
B8 = Size(4096, 32, 32, 8, 14336, tied=False)
"""The shapes of Llama 3.2 1B and 3B, and of Llama 3.1 8B (`planning.model_lookup.KNOWN`)."""
SMALL = Size(1024, 6, 16, 4, 4096, rows=8, length=512, prompt=32, micro_batch=2048)
"""Two hundred million weights over the same vocabulary, for what does not depend on size."""
TINY = Size(64, 2, 4, 2, 128, vocabulary=512, rows=6, length=48, prompt=8, micro_batch=96)
"""For the CPU."""


def random_model(config: ModelConfig, device: str, **options: Any) -> Any:
    """A transformers model of random weights, which no file holds, on a device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.path),
                                                dtype=getattr(torch, config.dtype), **options)


class RandomPolicy(PolicyLearner):
    """A policy learner whose model is made on its device, from the seed."""

    liger = False
    """Whether Liger's kernels replace norms, rotary embeddings and MLPs."""

    def build(self) -> PackedLanguageModel:
        """As `PolicyLearner.build`, without files."""
        from rlhf_ray.models.attention import register
        from rlhf_ray.models.cpu.linear import use_onednn

        assert isinstance(self.model_config, ModelConfig)
        model = random_model(self.model_config, "cuda" if torch.cuda.is_available() else "cpu")
        model.set_attn_implementation(register())
        if self.liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False, model=model)
        return PackedLanguageModel(use_onednn(model), self.temperature, self.chunks)


@dataclass(frozen=True)
class Setting:
    """One learner: its size and fields of `policy`."""

    size: Size
    fields: Mapping[str, Any] = field(default_factory=dict)
    chunks: Chunks | None = None
    """Instead of the learner's own."""
    liger: bool = False

    def config(self, gpu: bool) -> PolicyConfig:
        """The section `policy`."""
        values: dict[str, Any] = {"zero_stage": 0, "autocast": "bfloat16" if gpu else "float32",
                                  "gpus": 1.0 if gpu else 0.0, "micro_batch_tokens": self.size.micro_batch,
                                  "optimizer": OptimizerConfig(learning_rate=1e-4), **self.fields}
        return PolicyConfig.model_validate(values)

    def model(self, place: Place) -> ModelConfig:
        """Its config.json alone; published in bfloat16, as generators on GPUs have it."""
        (place.directory / "config.json").write_text(json.dumps(self.size.entries()))
        return ModelConfig(path=str(place.directory), dtype="bfloat16" if place.gpu else "float32")

    def files(self, place: Place) -> tuple[ModelConfig, dict[str, Tensor]]:
        """A model in files, and its tensors by the names of its parameters."""
        config = self.model(place)
        torch.manual_seed(SEED)
        model = random_model(config, "cpu")
        model.save_pretrained(config.path)
        return config, {name: tensor.detach() for name, tensor in model.named_parameters()}

    def shape(self, place: Place) -> ModelShape:
        """As `rlhf-ray plan` sees it."""
        return shape_of(self.model(place), "model")

    def plan(self, place: Place) -> Memory:
        """What `rlhf-ray plan` counts for it."""
        size = self.size
        return learner_memory(self.config(place.gpu), Training(
            self.shape(place), size.length, 1 - size.prompt / size.length, size.rows, bucket_bytes=float(BUCKET)))

    def start(self, place: Place) -> RandomPolicy:
        """The learner, alone in its process group."""
        learner = RandomPolicy(self.config(place.gpu), self.model(place), rank=0, world=1, seed=SEED, total_steps=100,
                               algorithm=ALGORITHM, temperature=1.0, longest=self.size.length)
        learner.chunks = self.chunks or learner.chunks
        learner.liger = self.liger
        learner.start(free_address("127.0.0.1"), TIMEOUT_S)
        return learner


def experience(size: Size) -> Experience:
    """Rows of random tokens with random advantages. Old log-probabilities are about those of random weights."""
    random, tokens = np.random.default_rng(SEED), size.rows * size.length
    mask = np.tile(np.arange(size.length) >= size.prompt, size.rows)
    old = np.where(mask, -np.log(size.vocabulary), 0).astype(np.float32)
    advantages = np.where(mask, random.standard_normal(tokens), 0).astype(np.float32)
    return Experience(
        offsets=offsets_of([size.length] * size.rows), response_mask=mask, behaviour_logprobs=old, old_logprobs=old,
        tokens=random.integers(2, size.vocabulary, tokens).astype(np.int32), reference_logprobs=None, values=None,
        advantages=advantages, returns=advantages, keys=[SampleKey(0, row, 0) for row in range(size.rows)])


def rollout_of(rows: Experience) -> Rollout:
    """The rows as a generator would have returned them."""
    return Rollout(offsets=rows.offsets, tokens=rows.tokens, response_mask=rows.response_mask,
                   logprobs=rows.behaviour_logprobs, versions=np.where(rows.response_mask, 0, -1).astype(np.int32),
                   keys=rows.keys, seeds=np.zeros(len(rows.keys), np.int64), finish_reasons=["length"] * len(rows.keys))


def optimizer_step(learner: RandomPolicy, rows: Experience, step: int) -> float:
    """Seconds of one optimizer step over all rows.

    Raises:
        RuntimeError: it was not applied.
    """
    stats = learner.update(step, 0.0, rows)
    if not stats.applied:
        raise RuntimeError("an optimizer step was left out: a loss or gradient was not finite")
    return stats.seconds


def state(learner: RandomPolicy) -> dict[str, Tensor]:
    """Weights and moments by kind and parameter, in main memory: the same keys at every ZeRO stage."""
    return dict(learner.engine.snapshot().tensors)


def hardware() -> Hardware | None:
    """The first GPU's data sheet."""
    gpus = gpus_here()
    return as_hardware(gpus[0]) if gpus else None
