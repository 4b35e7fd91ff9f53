"""What follows from the choice of an estimator: defaults, and whether a critic takes part."""

import pytest
import yaml

from rlhf_ray.config.algorithm import AlgorithmConfig, KLConfig
from rlhf_ray.config.derived import placements_of
from rlhf_ray.config.load import as_yaml, load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError

ALONE, GROUPS = ("reinforce", "reinforce_pp"), ("reinforce_baseline", "rloo", "grpo", "dr_grpo")


@pytest.mark.parametrize("estimator", ["gae", *ALONE, *GROUPS])
def test_defaults_follow_the_estimator(estimator):
    a = AlgorithmConfig(estimator=estimator)
    assert (a.kl.placement, a.kl.estimator) == (("loss", "k3") if estimator in GROUPS else ("reward", "k1"))
    assert a.kl_in_loss is (estimator in GROUPS)
    assert a.whiten_advantages is (estimator in ("gae", "reinforce_pp"))
    assert a.has_critic is (estimator == "gae") and a.compares_groups is (estimator in GROUPS)


@pytest.mark.parametrize("kl", [{"placement": "reward"}, KLConfig(placement="reward")])
def test_what_is_said_wins_over_what_follows(kl):
    a = AlgorithmConfig(estimator="rloo", whiten_advantages=True, kl=kl)
    assert (a.kl.placement, a.kl.estimator, a.whiten_advantages) == ("reward", "k1", True)
    assert AlgorithmConfig(kl={"placement": "loss", "estimator": "k2"}).kl.estimator == "k2"


def test_the_saved_configuration_names_what_followed(write, tmp_path):
    config = load(PPOConfig, write("ppo"), ["--algorithm.estimator=grpo", "--coordinator.samples_per_prompt=4"])
    (tmp_path / "saved.yaml").write_text(as_yaml(config))
    saved = yaml.safe_load((tmp_path / "saved.yaml").read_text())["algorithm"]
    assert (saved["kl"]["placement"], saved["kl"]["estimator"], saved["whiten_advantages"]) == ("loss", "k3", False)
    assert load(PPOConfig, tmp_path / "saved.yaml", []) == config


def test_a_critic_that_is_not_started_asks_for_nothing(write):
    room = "--pools.default.cpus=0.45"  # for all but a critic
    config = load(PPOConfig, write("ppo"), [room, "--algorithm.estimator=reinforce"])
    assert "critic" not in placements_of(config)
    with pytest.raises(ConfigError, match="critic 1x0.1"):
        load(PPOConfig, write("ppo"), [room])
    assert "critic" in placements_of(load(PPOConfig, write("ppo"), []))
