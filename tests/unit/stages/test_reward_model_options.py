"""The options of the reward model's training reach its learner, and the critic's its own."""

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import CriticConfig, RewardModelConfig
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.stages import reward_model
from tests.models import make_tiny_reward_model


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
