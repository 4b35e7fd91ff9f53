"""Each learner's default learning rate."""

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig, ProcessRewardConfig, RewardModelConfig, SFTConfig

RATES = [("sft", SFTConfig, "learner", 2e-5), ("reward-model", RewardModelConfig, "learner", 9e-6),
         ("process-reward", ProcessRewardConfig, "learner", 9e-6), ("ppo", PPOConfig, "policy", 1e-6),
         ("ppo", PPOConfig, "critic", 9e-6)]


@pytest.mark.parametrize(("stage", "cls", "section", "rate"), RATES)
def test_each_learner_has_its_own_rate_and_ten_times_that_with_adapters(stage, cls, section, rate, write):
    def rate_of(**settings):
        return getattr(load(cls, write(stage, **{section: settings}), []), section).optimizer.learning_rate

    assert rate_of() == rate_of(optimizer={"weight_decay": 0.1}) == rate
    assert rate_of(lora={"rank": 4}) == pytest.approx(10 * rate)
    assert rate_of(optimizer={"learning_rate": 0.5}, lora={"rank": 4}) == 0.5
