"""Learners of families that differ from Llama where passes can go wrong, sharded over two ranks: soft-caps and windows,
sinks and experts of two kinds, a logit scale with a head of our own, ALiBi on padded rows. Each start compares
gradients too."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.loading import load_scalar_model
from rlhf_ray.records import TokenScores
from rlhf_ray.roles.ppo_update import training_batch
from tests.cluster.learners.plain_torch import (
    SMALL,
    algorithm,
    assert_same_update,
    critic_arguments,
    make_rollout,
    plain_logprobs,
    plain_update,
    policy_arguments,
    policy_terms,
)
from tests.tiny_families import DECODERS, config_of, randomised

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
FAMILIES = ("gemma2", "gpt_oss", "granite", "bloom", "qwen3_moe")
LOGITS = 8 * 64
"""Logits at a time: several chunks in each pass."""


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """A model's directory, and one of its backbone with a scalar head."""
    language, reward = tmp_path / "language", tmp_path / "reward"
    shape = {**DECODERS[request.param], "max_position_embeddings": 64}
    model = transformers.AutoModelForCausalLM.from_config(config_of(request.param, **shape))
    randomised(model).save_pretrained(language)
    scalar = load_scalar_model(ModelConfig(path=str(language)), new_head=True)
    scalar.score.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    scalar.save_pretrained(reward)
    return SimpleNamespace(name=request.param, tied=language, reward=reward, head=scalar.score.weight.detach()[0])


def plain(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def test_log_probabilities_are_hugging_face_s(ranks, family, experiences):
    rollout = make_rollout(experiences[1])
    learners = ranks.make(2, "PolicyLearner", policy_arguments(family, 3, SMALL), LOGITS)
    found = TokenScores.concat(learners.do("logprobs", rollout))
    expected = plain_logprobs(plain(family.tied), rollout.tokens, rollout.offsets, rollout.response_mask)
    assert np.abs(found.values - expected).max() < 2e-5 and expected.min() < -1


def test_values_are_hugging_face_s(ranks, family, experiences):
    rollout = make_rollout(experiences[1])
    learners = ranks.make(2, "CriticLearner", critic_arguments(family, 3, SMALL))
    found, model = TokenScores.concat(learners.do("values", rollout)), plain(family.tied)
    rows = []
    with torch.no_grad():
        for i in range(len(rollout)):
            tokens = torch.from_numpy(rollout.row(i, "tokens").astype(np.int64))[None]
            values = model.base_model(tokens, use_cache=False).last_hidden_state[0] @ family.head
            rows.append(np.concatenate([[0.0], values[:-1].numpy()]))
    expected = np.where(rollout.response_mask, np.concatenate(rows), 0)
    assert np.abs(found.values - expected).max() < 1e-4 and np.abs(expected).max() > 0.1


def test_an_update_is_plain_torch_s(ranks, family, experiences):
    if family.name in ("gpt_oss", "qwen3_moe"):
        pytest.skip("experts that few tokens reach hardly move")
    algo = algorithm()
    learners = ranks.make(2, "PolicyLearner", policy_arguments(family, 3, SMALL, algo=algo), LOGITS)
    before = learners.weights()
    learners.do("update", 0, 0.0, *experiences)
    expected = plain_update(plain(family.tied), training_batch(experiences, algo.whitens), policy_terms, algo)
    assert_same_update(expected, before, learners.weights())
