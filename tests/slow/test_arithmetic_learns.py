"""The arithmetic example: rewards for right answers teach what the demonstrations got wrong, for three seeds."""

import json

import pytest

from rlhf_ray.stages import arithmetic_example
from tests.slow.conftest import SEEDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("arithmetic")


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_sums_come_out_right(seed, estimator, home):
    summary = arithmetic_example.run(home / str(seed), estimator, seed, [])
    assert 0.25 <= summary["reward_before"] <= 0.5, "it imitates pupils who are right on two sums of five"
    assert summary["reward_after"] >= 0.8
    assert summary["finished"] >= 0.98
    evaluation = json.loads((home / str(seed) / estimator / "evaluation.json").read_text())
    assert evaluation["after"]["responses"] == 512
