"""The options of the reward model's training reach its learner, and the critic's its own."""

import json

import pytest
import torch

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import CriticConfig, RewardModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.stages import reward_model
from tests.models import make_tiny_llama, make_tiny_reward_model


@pytest.fixture
def started(monkeypatch):
    """The stage that a configuration makes, and the module that its learner builds; nothing is started."""
    def of(path, **training):
        stages = []
        monkeypatch.setattr(reward_model, "preflight", lambda config: None)
        monkeypatch.setattr(reward_model, "run_supervised", lambda stage, resume: stages.append(stage))
        config = RewardModelConfig(model={"path": str(path)}, data={"path": "d.jsonl"}, training=training)
        reward_model.run(config)
        return stages[0], stages[0].learner(
            LearnerConfig(), config.model, 0, 1, 0, 10, 4, **stages[0].options).build()

    return of


def head_in(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")["score.weight"]


def test_a_reward_model_keeps_its_head_unless_asked_otherwise(started, tmp_path):
    path = make_tiny_reward_model(tmp_path / "r", 64)
    stage, module = started(path)
    assert torch.equal(module.model.score.weight, head_in(path))
    assert stage.start.startswith(f"the scalar head is that of {path}") and stage.measured_first
    stage, module = started(path, new_head=True)
    assert not torch.allclose(module.model.score.weight, head_in(path), atol=1e-3)
    assert stage.start == f"the scalar head is new; {path} gives the other weights" and not stage.measured_first


def test_a_language_model_gets_a_new_head(started, tmp_path):
    stage, module = started(path := make_tiny_llama(tmp_path / "m", 64, hidden=32, heads=1))
    assert module.model.score.weight.shape == (1, 32) and module.model.score.weight.std() > 0
    assert stage.start == f"the scalar head is new; {path} gives the other weights" and not stage.measured_first


def test_a_classifier_with_two_labels_is_refused_unless_its_head_is_replaced(started, tmp_path):
    from transformers import AutoModelForSequenceClassification

    path = make_tiny_reward_model(tmp_path / "r", 64)
    AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=2, id2label={0: "bad", 1: "good"}, ignore_mismatched_sizes=True).save_pretrained(path)
    said = (r"^model\.path='.*r' is a classifier with 2 labels, and a reward model has one score: name a classifier "
            r"with one label, .*, or set training\.new_head=true to replace its head$")
    with pytest.raises(ModelError, match=said):
        started(path)
    _, module = started(path, new_head=True)
    assert module.model.score.weight.shape == (1, 32)


def test_a_model_whose_other_weights_do_not_fit_is_refused_with_a_new_head_too(started, tmp_path):
    path = make_tiny_reward_model(tmp_path / "r", 64)
    shape = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**shape, "intermediate_size": 48}))
    for training in ({}, {"new_head": True}):
        with pytest.raises(ModelError, match="no model could be loaded from .*r'"):
            started(path, **training)


def test_a_start_whose_end_token_is_its_padding_was_scored_elsewhere(started, tmp_path):
    path = make_tiny_reward_model(tmp_path / "r", 64)
    assert "padding" not in started(path)[0].start
    shape = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**shape, "pad_token_id": 1}))
    assert "transformers has scored it at the token before the end" in started(path)[0].start


def test_the_learner_gets_the_options_of_training(tmp_path, monkeypatch):
    path, stages = str(make_tiny_reward_model(tmp_path / "r", 64)), []
    monkeypatch.setattr(reward_model, "preflight", lambda config: None)
    monkeypatch.setattr(reward_model, "run_supervised", lambda stage, resume: stages.append(stage))
    reward_model.run(RewardModelConfig(model={"path": path}, data={"path": "d.jsonl"},
                                       training={"head_dropout": 0.25}))
    learner = stages[0].learner(LearnerConfig(), ModelConfig(path=path), 0, 1, 0, 10, 4, **stages[0].options)
    assert learner.build().dropout.p == 0.25
    critic = CriticLearner(CriticConfig(head_dropout=0.4), ModelConfig(path=path), 0, 1, 0, 10, AlgorithmConfig())
    assert critic.build().dropout.p == 0.4
