"""Sections of `rewards`: chosen by type, overridden key by key, described by type, explained when wrong."""

import pytest

from rlhf_ray.config.derived import derive
from rlhf_ray.config.fields import describe_fields
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.load import as_yaml, load
from rlhf_ray.config.rewards import FunctionReward, ModelReward, NumberReward, RegexReward, rewards_in_words
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.config.training_loop import EarlyStopConfig
from rlhf_ray.errors import ConfigError

TWO = {"quality": {"type": "model", "path": "r", "dtype": "bfloat16"}, "sum": {"type": "number", "weight": 0.5}}


def test_the_type_chooses_the_section(write):
    rewards = load(PPOConfig, write("ppo", rewards=TWO), []).rewards
    assert isinstance(rewards["quality"], ModelReward) and rewards["quality"].weight == 1.0
    assert isinstance(rewards["sum"], NumberReward) and rewards["sum"].answer == "answer"


def test_fields_of_a_component_are_overridden_one_by_one(write, monkeypatch):
    monkeypatch.setenv("RLHF_RAY_REWARDS__SUM__TOLERANCE", "0.25")
    overrides = ["--rewards.sum.weight=-2", "--rewards.quality.path=other", "--rewards.more.type=function",
                 "--rewards.more.function=mine.py:score"]
    rewards = load(PPOConfig, write("ppo", rewards=TWO), overrides).rewards
    assert (rewards["sum"].weight, rewards["sum"].tolerance) == (-2.0, 0.25)
    assert (rewards["quality"].path, rewards["quality"].dtype) == ("other", "bfloat16")
    assert rewards["more"] == FunctionReward(type="function", function="mine.py:score")


def test_another_type_drops_the_keys_of_the_former_one(write):
    overrides = ["--rewards.quality.type=function", "--rewards.quality.function=mine.py:score"]
    quality = load(PPOConfig, write("ppo", rewards={"quality": {**TWO["quality"], "weight": 3}}), overrides).rewards
    assert quality == {"quality": FunctionReward(type="function", function="mine.py:score", weight=3.0)}


def test_what_is_saved_loads_to_the_same(write, tmp_path):
    config = load(PPOConfig, write("ppo", rewards=TWO), [])
    (tmp_path / "saved.yaml").write_text(as_yaml(config))
    assert load(PPOConfig, tmp_path / "saved.yaml", []) == config


@pytest.mark.parametrize("rewards, line", [
    ({"a": {"path": "r"}}, "rewards.a.type: is required (one of model, process, http, function, exact_match"),
    ({"a": {"type": "mdoel", "path": "r"}}, "rewards.a.type='mdoel': must be one of model, process, http, function"),
    ({"a": {"type": "model"}}, "rewards.a.path: is required (Directory in Hugging Face format, or a Hub name)"),
    ({"a": {"type": "function"}}, "rewards.a.function: is required (`module:name`, or `file.py:name`)"),
    ({"a": {"type": "number", "tolerance": -1}}, "rewards.a.tolerance=-1: must be at least 0"),
    ({"a": {"type": "number", "tolerence": 1}}, "rewards.a.tolerence: unknown key; did you mean tolerance?"),
    ({"a": {"type": "regex", "pattern": "("}}, "rewards.a: pattern='(' is not a regular expression: missing )"),
    ({"a": {"type": "model", "path": "r", "trust_remote_code": True}}, "rewards.a: trust_remote_code=true runs"),
    ({"a b": {"type": "model", "path": "r"}}, "rewards: 'a b' is not a valid name of a component"),
    ({"a/b": {"type": "model", "path": "r"}}, "rewards: 'a/b' is not a valid name of a component"),
    ({}, "rewards"),
])
def test_what_is_wrong_is_told_with_its_place(write, rewards, line):
    with pytest.raises(ConfigError) as caught:
        load(PPOConfig, write("ppo", rewards=rewards), [])
    assert line in str(caught.value) and "ModelReward" not in str(caught.value)


@pytest.mark.parametrize("rewards, has", [
    ({"a": {"type": "number"}}, "none"), ({n: {"type": "model", "path": n} for n in "ab"}, "2"),
])
def test_a_critic_starts_from_the_one_reward_model_there_is(write, rewards, has):
    with pytest.raises(ConfigError, match=rf"critic\.init=reward starts .* rewards has {has}; use critic"):
        load(PPOConfig, write("ppo", rewards=rewards), ["--critic.init=reward"])
    load(PPOConfig, write("ppo", rewards=rewards), ["--critic.init=policy"])
    one = load(PPOConfig, write("ppo", rewards=TWO), ["--critic.init=reward"])
    assert derive(one).critic_model is one.rewards["quality"]
    assert derive(load(PPOConfig, write("ppo", rewards=TWO), [])).critic_model.path == "m"


def test_fields_say_of_which_types_they_are():
    fields = {f.path: f for f in describe_fields(PPOConfig) if f.section == "rewards"}
    assert fields["rewards.NAME.type"].required and "exact_match" in fields["rewards.NAME.type"].type
    assert fields["rewards.NAME.weight"].sentence.startswith("Factor of this component")
    assert fields["rewards.NAME.tolerance"].sentence.startswith("number: ")
    assert "exact_match: Column" in (answer := fields["rewards.NAME.answer"]).sentence
    assert answer.default == "by type" and not answer.required


def test_rewards_in_words():
    words = rewards_in_words({name: {"weight": 1.0, **section} for name, section in TWO.items()})
    assert words == "quality (model r), sum (number, x 0.5)"


@pytest.mark.parametrize(("section", "field", "value"), [
    (ModelReward, {"type": "model", "path": "m"}, {"label": False}),
    (RegexReward, {"type": "regex", "pattern": "(a)"}, {"group": True}),
    (EarlyStopConfig, {}, {"reward_below_start": False}), (EarlyStopConfig, {}, {"kl_above": True}),
    (SamplingConfig, {}, {"stop_token_ids": [3, True]}),
])
def test_a_truth_value_is_no_number(section, field, value):
    """YAML reads `label: NO` as false, which would be label 0: another one, perhaps."""
    with pytest.raises(ConfigError, match="has a truth value, as which YAML reads yes, no.*text in quotes"):
        section(**field, **value)
