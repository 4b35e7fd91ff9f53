"""The frozen models against transformers' own outputs; a score that is no number is an error."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import RewardError
from rlhf_ray.roles.reference_scorer import ReferenceScorer
from rlhf_ray.roles.reward_scorer import RewardScorer


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [6, 1000])
def test_the_reference_says_what_transformers_says(rollout, policy_model, transformers_model, temperature, budget):
    scorer = ReferenceScorer(policy_model, budget, temperature)
    scorer.start()
    scores = scorer.logprobs(rollout)
    model = transformers_model("AutoModelForCausalLM", policy_model.path)
    for i in range(len(rollout)):
        tokens = torch.from_numpy(rollout.row(i, "tokens").astype(np.int64))
        with torch.no_grad():
            logprobs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
        expected = np.zeros(len(tokens))
        expected[1:] = logprobs[:-1].gather(-1, tokens[1:, None])[:, 0]
        expected[~rollout.row(i, "response_mask")] = 0
        assert scores.row(i, "values") == pytest.approx(expected, abs=1e-5)
    assert not scores.values[~rollout.response_mask].any()


@pytest.mark.parametrize("budget", [6, 1000])
def test_the_reward_model_says_what_transformers_says(rollout, reward_model, transformers_model, budget):
    scorer = RewardScorer(reward_model, budget)
    scorer.start()
    scores = scorer.score(rollout).scores
    model = transformers_model("AutoModelForSequenceClassification", reward_model.path)
    for i, score in enumerate(scores):
        with torch.no_grad():
            tokens = torch.from_numpy(rollout.row(i, "tokens").astype(np.int64))
            assert score == pytest.approx(model(tokens[None]).logits.item(), abs=1e-5)
    assert scores.dtype == np.float32 and len(set(scores.tolist())) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_an_error_that_names_the_samples(rollout, reward_model, tmp_path, bad):
    directory = shutil.copytree(reward_model.path, tmp_path / "damaged")
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][rollout.row(1, "tokens")[-1]] = bad
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    only_there = rollout.row(1, "tokens")[-1] not in [*rollout.row(0, "tokens"), *rollout.row(2, "tokens")]
    assert only_there, "the damaged token should be in one row alone"
    scorer = RewardScorer(ModelConfig(path=str(directory)), 1000)
    scorer.start()
    with pytest.raises(RewardError, match=r"damaged' gave nan for 1 of 3 samples \(epoch 0 row 1 sample 0\)"):
        scorer.score(rollout)
