"""Unions on `type`: the short form, keys of other types, and how layers are merged."""

import logging

import pytest
import yaml

from rlhf_ray.config.algorithm import AlgorithmConfig, GRPOAlgorithm
from rlhf_ray.config.conditional_fields import without_effect
from rlhf_ray.config.estimators import ESTIMATORS, GAEEstimator, GRPOEstimator
from rlhf_ray.config.load import as_yaml, load
from rlhf_ray.config.losses import CISPOLoss, ImportanceConfig
from rlhf_ray.config.stages import GRPOConfig, PPOConfig
from rlhf_ray.errors import ConfigError


class TestForms:
    @pytest.mark.parametrize("given", ["grpo", {"type": "grpo"}, GRPOEstimator()])
    def test_a_name_a_mapping_and_a_section_are_the_same(self, given):
        assert AlgorithmConfig(estimator=given).estimator == GRPOEstimator()

    def test_without_a_type_the_default_one_is_meant(self):
        assert AlgorithmConfig(estimator={"lam": 0.9}).estimator == GAEEstimator(lam=0.9)
        assert AlgorithmConfig(loss={"clip_high": 0.28}).loss.type == "clip"

    def test_a_file_the_environment_and_the_command_line_take_a_name(self, write, monkeypatch):
        path = write("ppo", algorithm={"loss": "cispo"})
        monkeypatch.setenv("RLHF_RAY_ALGORITHM__ESTIMATOR", "rloo")
        config = load(PPOConfig, path, ["--coordinator.samples_per_prompt=4"])
        assert (config.algorithm.loss.type, config.algorithm.estimator.type) == ("cispo", "rloo")
        config = load(PPOConfig, path, ["--algorithm.estimator=reinforce"])
        assert config.algorithm.estimator.type == "reinforce"

    @pytest.mark.parametrize("estimator", ["gae", {"type": "gae"}, {"lam_critic": 1.0}])
    def test_a_key_is_set_over_a_file_with_any_form(self, estimator, write):
        config = load(PPOConfig, write("ppo", algorithm={"estimator": estimator}), ["--algorithm.estimator.lam=0.9"])
        kept = {} if isinstance(estimator, str) else estimator
        assert config.algorithm.estimator == GAEEstimator(lam=0.9, **kept)

    @pytest.mark.parametrize("first", [0, 1])
    def test_name_and_key_may_both_be_given_in_either_order(self, first, write, monkeypatch):
        given = ["--algorithm.estimator=gae", "--algorithm.estimator.lam=0.9"]
        found = load(PPOConfig, write("ppo"), [given[first], given[1 - first]]).algorithm.estimator
        assert found == GAEEstimator(lam=0.9)
        monkeypatch.setenv("RLHF_RAY_ALGORITHM__ESTIMATOR", "reinforce")
        monkeypatch.setenv("RLHF_RAY_ALGORITHM__ESTIMATOR__GAMMA", "0.5")
        found = load(PPOConfig, write("ppo"), []).algorithm.estimator
        assert (found.type, found.gamma) == ("reinforce", 0.5)

    @pytest.mark.parametrize("given", [None, 3, ["grpo"], {"type": ["grpo"]}, {"type": None}, {1: 2}])
    @pytest.mark.parametrize("preset", [{}, {"preset": "grpo"}])
    def test_what_is_no_form_of_a_section_is_an_error_of_that_field(self, given, preset):
        for cls in (AlgorithmConfig, GRPOAlgorithm):
            with pytest.raises(ConfigError, match=r"\n  (estimator|loss)[.=]"):
                cls(**preset, estimator=given, loss=given)
        with pytest.raises(ConfigError, match="loss=3: must be one of clip, cispo, or a section with `type`"):
            AlgorithmConfig(loss=3)

    def test_a_command_of_an_estimator_takes_its_fields(self, write):
        assert load(GRPOConfig, write("ppo"), ["--algorithm.estimator.whiten=true"]).algorithm.whitens


class TestKeysOfOtherTypes:
    def test_a_sweep_over_estimators_runs_and_warns_of_what_does_not_act(self, write, caplog):
        path = write("ppo", algorithm={"estimator": {"lam": 0.9}, "loss": {"clip_low": 0.1}})
        with caplog.at_level(logging.WARNING):
            config = load(PPOConfig, path, ["--algorithm.estimator=reinforce", "--algorithm.loss=cispo"])
        assert caplog.messages == [
            "the configuration has values without effect:\n"
            f"  algorithm.estimator.lam=0.9 [{path}:11] has no effect: algorithm.estimator is of type reinforce, and "
            "only gae has lam; leave it out\n"
            f"  algorithm.loss.clip_low=0.1 [{path}:13] has no effect: algorithm.loss is of type cispo, and only clip "
            "has clip_low; leave it out"]
        assert "lam" not in config.algorithm.estimator.model_fields_set

    @pytest.mark.parametrize(("given", "dropped"), [
        (["--algorithm.estimator=reinforce", "--algorithm.estimator.lam=0.9"], "algorithm.estimator.lam"),
        (["--algorithm.estimator={type: reinforce, lam: 0.9}"], "algorithm.estimator.lam"),
        (["--algorithm.loss=cispo", "--algorithm.loss.clip_high=0.3"], "algorithm.loss.clip_high"),
        (["--rewards.main.type=number"], "rewards.main.path"),
        (["--rewards.main={type: number, path: r, tolerance: 0.1}"], "rewards.main.path"),
        (["--rewards.other.type=vader", "--rewards.other.urls=[https://a]"], "rewards.other.urls")])
    def test_they_are_not_in_the_saved_configuration_which_loads_without_a_warning(
            self, given, dropped, write, tmp_path, caplog):
        saved = tmp_path / "config.yaml"
        saved.write_text(as_yaml(load(PPOConfig, write("ppo"), given)))
        assert f"\n  {dropped}=" in caplog.text
        caplog.clear()
        section = yaml.safe_load(saved.read_text())
        *above, key = dropped.split(".")
        for name in above:
            section = section[name]
        load(PPOConfig, saved, [])
        assert not caplog.records and key not in section

    @pytest.mark.parametrize("kind", ["model", "number", "http", "function"])
    def test_a_key_of_no_reward_is_an_error(self, kind, write):
        with pytest.raises(ConfigError, match=r"rewards\.main\.wieght: unknown key; did you mean weight\?"):
            load(PPOConfig, write("ppo"), [f"--rewards.main.type={kind}", "--rewards.main.wieght=2"])

    def test_what_acts_is_not_warned_of(self, write, caplog):
        with caplog.at_level(logging.WARNING):
            load(PPOConfig, write("ppo"), ["--algorithm.estimator={type: gae, lam: 0.9}"])
        assert not caplog.messages

    def test_from_python_it_is_known_to_the_configuration(self):
        rest = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": {"r": {"type": "number"}}}
        config = PPOConfig(**rest, algorithm={"estimator": {"type": "reinforce", "lam_alpha": 0.05}})
        assert [(value.shown, value.refused) for value in without_effect(config)] == [
            ("algorithm.estimator.lam_alpha=0.05", False)]

    def test_they_make_no_difference_to_equality(self):
        assert AlgorithmConfig(estimator={"type": "grpo", "lam": 0.9}) == AlgorithmConfig(estimator="grpo")
        assert AlgorithmConfig(estimator={"type": "grpo", "whiten": True}) != AlgorithmConfig(estimator="grpo")

    @pytest.mark.parametrize("section", ESTIMATORS)
    def test_a_key_of_no_type_is_an_error(self, section):
        with pytest.raises(ConfigError, match=r"estimator\.lmda: unknown key"):
            AlgorithmConfig(estimator={"type": section().type, "lmda": 0.9})

    def test_a_name_of_no_type_is_an_error_that_lists_them(self, write):
        with pytest.raises(ConfigError, match=r"algorithm\.loss\.type='cipso': must be one of clip, cispo \[--algo"):
            load(PPOConfig, write("ppo"), ["--algorithm.loss=cipso"])


class TestCISPO:
    def test_its_ratio_is_to_the_generators_probabilities_and_nothing_else_weights(self):
        a = AlgorithmConfig(loss="cispo")
        assert (a.old_logprobs, a.importance.tokens, a.importance.acts) == ("generator", "none", False)
        a = AlgorithmConfig(loss=CISPOLoss(), old_logprobs="policy")
        assert (a.old_logprobs, a.importance.tokens) == ("policy", "none")

    @pytest.mark.parametrize("importance", [{"tokens": "truncate"}, {"masks": ["outlier"]}])
    def test_importance_weights_beside_it_are_refused(self, importance):
        with pytest.raises(ConfigError, match="with loss=cispo would weight tokens twice"):
            AlgorithmConfig(loss="cispo", importance=importance)

    def test_the_policys_own_denominator_does_not_see_staleness(self, write):
        path = write("ppo", algorithm={"loss": "cispo", "old_logprobs": "policy"})
        load(PPOConfig, path, [])
        with pytest.raises(ConfigError, match=r"old_logprobs=policy.*max_staleness=1.*generator"):
            load(PPOConfig, path, ["--coordinator.max_staleness=1"])


def test_a_sandbox_that_would_hold_nothing_back_is_refused(write):
    reward = {"type": "function", "function": "rewards.py:score", "sandbox": {"memory_mb": 512}}
    with pytest.raises(ConfigError, match="only code has sandbox, and the run would hold no programs back"):
        load(PPOConfig, write("ppo", rewards={"own": reward}), [])


class TestImportance:
    @pytest.mark.parametrize(("name", "bounds"), [
        ("band", [5.0, 0.5]), ("band", [0.0, 5.0]), ("geometric", [1.01, 1.01]), ("outlier", [-1.0, 100.0])])
    def test_bounds_are_positive_and_in_order(self, name, bounds):
        with pytest.raises(ConfigError, match=rf"{name}=\[.*\] must be two positive bounds"):
            ImportanceConfig(**{name: bounds})

    def test_masks_go_without_weights_of_tokens(self):
        a = AlgorithmConfig(importance={"tokens": "none", "masks": ["geometric", "outlier"]})
        assert a.importance.acts and a.importance.geometric == (0.99, 1.01)

    def test_a_mask_is_named_once(self):
        with pytest.raises(ConfigError, match="names one twice"):
            ImportanceConfig(masks=["outlier", "outlier"])


def test_a_penalty_of_k1_in_the_loss_needs_the_ratio():
    kl = {"placement": "loss", "estimator": "k1"}
    assert AlgorithmConfig(kl=kl).kl.unbiased
    with pytest.raises(ConfigError, match="penalises nothing"):
        AlgorithmConfig(kl={**kl, "unbiased": False})


@pytest.mark.parametrize(("old", "new"), [
    ("clip_low", "loss.clip_low"), ("clip_high", "loss.clip_high"), ("dual_clip", "loss.dual_clip"),
    ("ratio", "loss.ratio"),
    ("lam_alpha", "estimator.lam_alpha"), ("lam_critic", "estimator.lam_critic"),
    ("importance_cap", "importance.cap"),
    ("importance_level", "importance.level")])
def test_a_name_of_another_place_leads_there(old, new, write):
    with pytest.raises(ConfigError, match=rf"algorithm\.{old}: unknown key; did you mean algorithm\.{new}\?"):
        load(PPOConfig, write("ppo"), [f"--algorithm.{old}=1"])
