"""The passes of an update read nothing from their device: a GPU would have to finish its work first.

Tensors on torch's meta device have shapes and no numbers. What reads one fails there, where it would wait for a GPU.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import CriticConfig
from rlhf_ray.engine.deepspeed_engine import StepResult
from rlhf_ray.models.attention import register
from rlhf_ray.models.packed_model import Chunks, PackedActorCritic, PackedLanguageModel, PackedScalarModel
from rlhf_ray.records import Batch, offsets_of
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.micro_batch import AverageMeter
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.ppo_update import Update

META = torch.device("meta")
VOCABULARY, PROMPT = 40, 2
LENGTHS = [5, 9, 6, 4]
CHUNKED = Chunks(elements=VOCABULARY * 4)
EVERYTHING = {
    "kl": {"placement": "loss"}, "entropy_coef": 0.1, "loss": {"dual_clip": 3.0}, "aggregate": "sequence",
    "importance": {"tokens": "band", "masks": ["geometric", "outlier"]},
}


@pytest.fixture(scope="module")
def model():
    """A tiny Llama without numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with META:
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32))
        model.score = torch.nn.Linear(16, 1, bias=False)
    model.set_attn_implementation(register())
    return model


def batch(stop_tokens_later=False):
    """Random rows; with `stop_tokens_later` token 0 had no probability at the first token of every response."""
    rng, offsets = np.random.default_rng(0), offsets_of(LENGTHS)
    mask = np.concatenate([np.arange(length) >= PROMPT for length in LENGTHS])
    columns = [np.where(mask, rng.standard_normal(len(mask)), 0).astype(np.float32) for _ in range(6)]
    rows = Batch(offsets, rng.integers(1, VOCABULARY, len(mask)).astype(np.int32), mask, *columns)
    if not stop_tokens_later:
        return rows
    sizes = np.zeros(len(mask), np.int32)
    sizes[offsets[:-1] + PROMPT] = -1
    return replace(rows, mask_sizes=sizes, mask_tokens=np.zeros(len(LENGTHS), np.int32))


@pytest.mark.parametrize(("cls", "config", "module", "changes", "rows"), [
    (PolicyLearner, PolicyConfig, lambda model: PackedLanguageModel(model, 0.9), {}, batch()),
    (PolicyLearner, PolicyConfig, lambda model: PackedLanguageModel(model, 0.9, CHUNKED), EVERYTHING, batch()),
    (PolicyLearner, PolicyConfig, lambda model: PackedLanguageModel(model, 0.9), {}, batch(stop_tokens_later=True)),
    (PolicyLearner, PolicyConfig, lambda model: PackedLanguageModel(model, 0.9), {"loss": "cispo"}, batch()),
    (CriticLearner, CriticConfig, PackedScalarModel, {}, batch()),
    (ActorCriticLearner, PolicyConfig, lambda model: PackedActorCritic(model, 0.9), EVERYTHING, batch()),
], ids=["policy", "policy, every option, chunked", "policy, min_tokens", "policy, CISPO", "critic",
        "policy and critic in one"])
def test_the_passes_of_an_optimizer_step_read_nothing_from_the_device(model, cls, config, module, changes, rows):
    algorithm = AlgorithmConfig(**changes)
    with META:
        packed = module(model)
    more = {} if cls is CriticLearner else {"temperature": 0.9}
    learner = cls(config(micro_batch_tokens=12), ModelConfig(path="unused"), 0, 1, 3, 1, algorithm=algorithm, **more)
    losses, meter = [], AverageMeter()
    learner.engine = SimpleNamespace(
        device=META, forward=packed, backward=lambda loss: losses.append(loss) or loss.backward(),
        step=lambda: StepResult(applied=True, grad_norm=1.0, learning_rate=0.1))
    learner.optimize(rows, learner.chosen_rows(rows), Update(kl_coef=0.1), meter)
    assert len(losses) > 1 and {loss.device for loss in losses} == {META}
    with pytest.raises((NotImplementedError, RuntimeError)):
        meter.means()  # the one reading, after all passes
