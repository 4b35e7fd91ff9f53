"""Learning rates, step by step."""

import math

import pytest

from rlhf_ray.config.learner import OptimizerConfig
from rlhf_ray.engine.deepspeed_engine import learning_rate
from rlhf_ray.errors import ConfigError


def rates(total, steps=None, **settings):
    config = OptimizerConfig(learning_rate=0.8, **settings)
    return [learning_rate(config, step, total) for step in range(steps or total)]


def test_a_constant_rate_is_constant():
    assert rates(5) == [0.8] * 5


def test_warm_up_rises_evenly_to_the_peak():
    assert rates(6, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_warm_up_may_be_a_share_of_the_run():
    assert rates(6, warmup_ratio=0.5) == pytest.approx([0.8 / 3, 1.6 / 3, 0.8, 0.8, 0.8, 0.8])
    assert rates(10, warmup_ratio=0.11)[:3] == pytest.approx([0.4, 0.8, 0.8]), "rounded up"
    assert rates(6, warmup_ratio=0.5, decay="linear") == pytest.approx(rates(6, warmup_steps=3, decay="linear"))
    with pytest.raises(ConfigError, match=r"warmup_ratio=0.5 and warmup_steps=3 both set the warm-up"):
        rates(6, warmup_ratio=0.5, warmup_steps=3)


def test_linear_decay_ends_at_its_floor_on_the_last_step():
    assert rates(5, decay="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    assert rates(5, decay="linear", min_ratio=0.5) == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4])


def test_cosine_decay_by_hand():
    half = 0.8 * 0.5
    expected = [0.8, half * (1 + math.sqrt(0.5)), half, half * (1 - math.sqrt(0.5)), 0.0]
    assert rates(5, decay="cosine") == pytest.approx(expected)
    assert rates(5, decay="cosine", min_ratio=0.25)[2] == pytest.approx(0.8 * (0.25 + 0.75 * 0.5))


def test_decay_begins_when_warm_up_is_over():
    assert rates(6, warmup_steps=2, decay="linear") == pytest.approx([0.4, 0.8, 0.8, 0.8 * 2 / 3, 0.8 / 3, 0.0])


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_steps_past_the_end_stay_at_the_floor(decay):
    assert rates(3, steps=6, decay=decay, min_ratio=0.1)[2:] == pytest.approx([0.08] * 4)


@pytest.mark.parametrize("total, warmup", [(1, 0), (3, 3), (2, 5)])
def test_short_runs_divide_by_nothing(total, warmup):
    assert all(0 < rate < 0.8001 for rate in rates(total, warmup_steps=warmup, decay="linear"))
