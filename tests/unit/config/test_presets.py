"""`algorithm.preset`: what it fills in, what it leaves alone, and what contradicts it."""

import logging
from typing import get_args

import pytest
import yaml

from rlhf_ray.cli.presets import preset_yaml
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.fields import describe_fields
from rlhf_ray.config.load import COMMANDS, as_yaml, load
from rlhf_ray.config.presets import PRESETS, ShareOf
from rlhf_ray.config.settled import value_at
from rlhf_ray.config.stages import GRPOConfig, PPOConfig, RLOOConfig
from rlhf_ray.config.training_loop import CoordinatorConfig
from rlhf_ray.errors import ConfigError

REST = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": {"r": {"type": "number"}}}


def without_preset(config):
    values = config.model_dump()
    del values["algorithm"]["preset"]
    return values


def test_the_field_takes_every_preset():
    assert set(get_args(get_args(AlgorithmConfig.model_fields["preset"].annotation)[0])) == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_is_one_of_a_field_and_has_a_source(name):
    known = {field.path for field in describe_fields(PPOConfig)}
    for path, (_, source) in PRESETS[name].values.items():
        assert path.removesuffix(".type") in known and source


@pytest.mark.parametrize("name", PRESETS)
def test_it_fills_in_its_values_where_nothing_is_set(name, write):
    config = load(PPOConfig, write("ppo"), [f"--algorithm.preset={name}"])
    for path, (value, _) in PRESETS[name].values.items():
        assert value_at(config, path) == (51 if isinstance(value, ShareOf) else value), path


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_printed_and_pasted_is_the_same_configuration(name, write):
    pasted = yaml.safe_load(preset_yaml(name))
    config = load(PPOConfig, write("ppo", **pasted), [])
    assert without_preset(config) == without_preset(load(PPOConfig, write("ppo"), [f"--algorithm.preset={name}"]))


@pytest.mark.parametrize("name", PRESETS)
def test_the_saved_configuration_is_read_back(name, write, tmp_path):
    config = load(PPOConfig, write("ppo"), [f"--algorithm.preset={name}"])
    (tmp_path / "saved.yaml").write_text(as_yaml(config))
    assert load(PPOConfig, tmp_path / "saved.yaml", []) == config


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_preset_is_what_the_command_of_its_name_does(name, write):
    by_command = load(COMMANDS[name], write("ppo"), [])
    assert without_preset(load(PPOConfig, write("ppo"), [f"--algorithm.preset={name}"])) == without_preset(by_command)


def test_the_preset_of_ppo_is_what_nobody_sets(write):
    assert without_preset(load(PPOConfig, write("ppo"), ["--algorithm.preset=ppo"])) == without_preset(
        load(PPOConfig, write("ppo"), []))


def test_what_is_set_anywhere_wins(write, monkeypatch):
    path = write("ppo", algorithm={"preset": "dapo", "loss": {"clip_high": 0.3}, "kl": {"coef": 0.01}},
                 coordinator={"samples_per_prompt": 4})
    monkeypatch.setenv("RLHF_RAY_ALGORITHM__OVERLONG_BUFFER", "10")
    config = load(PPOConfig, path, ["--algorithm.mini_batches=2"])
    a = config.algorithm
    assert (a.loss.clip_low, a.loss.clip_high, a.kl.coef, a.overlong_buffer, a.mini_batches) == (0.2, 0.3, 0.01, 10, 2)
    assert config.coordinator.samples_per_prompt == 4
    assert load(PPOConfig, path, ["--algorithm.overlong_buffer=null"]).algorithm.overlong_buffer is None


def test_from_python_sections_count_as_what_is_set_in_them():
    config = PPOConfig(**REST, algorithm=AlgorithmConfig(preset="grpo", epochs=2),
                       coordinator=CoordinatorConfig(prompts_per_step=4))
    assert (config.algorithm.estimator.type, config.algorithm.epochs, config.algorithm.kl.coef) == ("grpo", 2, 0)
    assert (config.coordinator.prompts_per_step, config.coordinator.samples_per_prompt) == (4, 8)
    assert AlgorithmConfig(preset="gspo").loss.ratio == "sequence"


def test_the_buffer_of_dapo_is_a_share_of_the_longest_response(write):
    config = load(PPOConfig, write("ppo"), ["--algorithm.preset=dapo", "--generator.sampling.max_tokens=500"])
    assert config.algorithm.overlong_buffer == 100


def test_another_loss_has_its_own_defaults(write, caplog):
    with caplog.at_level(logging.WARNING):
        a = load(PPOConfig, write("ppo"), ["--algorithm.preset=gspo", "--algorithm.loss=cispo"]).algorithm
    assert (a.loss.type, a.loss.max_ratio, a.old_logprobs, caplog.messages) == ("cispo", 5.0, "generator", [])
    a = load(PPOConfig, write("ppo"), ["--algorithm.preset=cispo", "--algorithm.loss=clip"]).algorithm
    assert (a.loss.clip_low, a.old_logprobs) == (0.2, "policy")


def test_keys_of_the_presets_loss_need_no_type(write, caplog):
    with caplog.at_level(logging.WARNING):
        a = load(PPOConfig, write("ppo"), ["--algorithm.preset=cispo", "--algorithm.loss.max_ratio=8"]).algorithm
    assert (a.loss.type, a.loss.max_ratio, a.old_logprobs, caplog.messages) == ("cispo", 8.0, "generator", [])
    assert AlgorithmConfig(preset="cispo", loss={"max_ratio": 8}).loss == a.loss


def test_a_value_of_a_preset_that_has_no_effect_is_not_warned_of(write, caplog):
    one_step = ["--algorithm.epochs=1", "--algorithm.mini_batches=1"]
    load(PPOConfig, write("ppo"), ["--algorithm.preset=gspo", *one_step])
    assert not caplog.records
    load(PPOConfig, write("ppo"), ["--algorithm.preset=gspo", "--algorithm.loss.clip_low=0.01", *one_step])
    assert "clip_low=0.01 [--algorithm.loss.clip_low] has no effect" in caplog.text


def test_a_command_takes_presets_of_its_estimator_only(write):
    assert load(GRPOConfig, write("ppo"), ["--algorithm.preset=dapo"]).algorithm.loss.clip_high == 0.28
    with pytest.raises(ConfigError, match="preset=grpo trains with estimator=grpo, which contradicts `rlhf-ray rloo`; "
                                          "use `rlhf-ray grpo`"):
        load(RLOOConfig, write("ppo"), ["--algorithm.preset=grpo"])
    with pytest.raises(ConfigError, match="contradicts `rlhf-ray grpo`; use `rlhf-ray ppo`"):
        load(GRPOConfig, write("ppo"), ["--algorithm.preset=dr_grpo"])


def test_another_estimator_contradicts_it(write):
    path = write("ppo", algorithm={"estimator": "rloo"})
    with pytest.raises(ConfigError, match=r"preset=grpo trains with estimator=grpo, which contradicts estimator=rloo"):
        load(PPOConfig, path, ["--algorithm.preset=grpo"])
    assert load(PPOConfig, path, ["--algorithm.preset=rloo"]).coordinator.samples_per_prompt == 4


def test_a_name_of_none_is_an_error_that_lists_them(write):
    with pytest.raises(ConfigError, match="algorithm.preset='gppo': must be one of ppo, grpo, dapo"):
        load(PPOConfig, write("ppo"), ["--algorithm.preset=gppo"])


@pytest.mark.parametrize(("given", "draws"), [("true", 10), ("false", None), ("null", None)])
def test_dynamic_sampling_of_a_preset_is_switched_on_and_off_on_the_command_line(write, given, draws):
    config = load(PPOConfig, write("ppo"), ["--algorithm.preset=dapo", "--generator.chunk=16",
                                              f"--algorithm.dynamic_sampling={given}"])
    dynamic = config.algorithm.dynamic_sampling
    assert (dynamic and dynamic.max_batches) == draws


def test_the_type_of_a_union_is_the_first_of_its_values_in_a_preset():
    """`fill` makes a section of the short form there, before the others are filled in."""
    for preset in PRESETS.values():
        paths = list(preset.values)
        for section in ("algorithm.estimator.", "algorithm.loss."):
            its = [path for path in paths if path.startswith(section)]
            assert its[:1] in ([], [f"{section}type"])


def test_a_field_of_the_presets_loss_leaves_its_type_and_its_other_values(write):
    loaded = load(PPOConfig, write("ppo"), ["--algorithm.preset=cispo", "--generator.chunk=16",
                                            "--algorithm.loss.max_ratio=8"]).algorithm
    assert (loaded.loss.type, loaded.loss.max_ratio, loaded.old_logprobs) == ("cispo", 8, "generator")
    assert AlgorithmConfig(preset="gspo", loss={"clip_low": 0.1}).loss.ratio == "sequence"
