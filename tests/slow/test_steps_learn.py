"""The arithmetic example's steps: a model learns to judge columns, from hard and from soft labels, and rewards where
right columns end raise the share of right columns."""

import json

import pytest

from rlhf_ray.stages import ppo, process_reward, sft
from rlhf_ray.stages.arithmetic_example import RECIPE, make_data

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Data, and a policy that imitates pupils."""
    root = tmp_path_factory.mktemp("arithmetic")
    make_data(root, 0)
    sft.run(RECIPE.config("sft", root, 0))
    return root


@pytest.fixture(scope="module")
def hard(home):
    """Summary of a judge that learned whether steps are right."""
    return process_reward.run(RECIPE.config("process-reward", home, 0))


def test_hard_labels_are_learned(hard):
    assert hard["accuracy"] >= 0.93, "two of three steps are right"


def test_soft_labels_are_learned(home):
    overrides = [f"--data.path={home / 'data' / 'soft_steps.jsonl'}", f"--run.dir={home / 'soft'}"]
    soft = process_reward.run(RECIPE.config("process-reward", home, 0, overrides))
    assert soft["accuracy"] >= 0.93


def test_rewarded_columns_come_out_right(home, hard):
    ppo.run(RECIPE.config("ppo", home, 0, file="steps"))
    evaluation = json.loads((home / "steps" / "evaluation.json").read_text())
    before, after = evaluation["before"], evaluation["after"]
    assert before["reward/right_steps"] < 0.7
    assert after["reward/right_steps"] >= 0.85
    assert after["reward/right"] >= before["reward/right"] + 0.3, "and with the columns the answers"
    assert after["kl"] < 10
